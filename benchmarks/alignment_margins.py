"""Margins of the trainer-engine checks: healthy models, and faults planted in a running engine.

    python benchmarks/alignment_margins.py [--models tiny,trained_tiny] [--dtypes float32,bfloat16]

Real Megatron ranks (TP 2) and a real vLLM engine on CPU. For each model and type: three weight
syncs of healthy weights, then each fault in the engine alone (``planted_faults.py``), with what the
gate measures, which tensors the fingerprints name and which constants differ. Prints one JSON line
per row, then a table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: differences as multiples of the rounding noise."""
    lines = [
        "| model | type | engine | mean | largest | gate | fingerprints | constants |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = f"{row['ratio']:.1f} | {row['max_ratio']:.1f}"
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['case']} | {ratios} "
            f"| {row['gate']} | {row['fingerprints']} | {row['constants']} |"
        )
    return "\n".join(lines)


def main() -> None:
    from margin_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="of: " + ", ".join(MODELS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--folder", action="append", default=[], help="another model")
    arguments = parser.parse_args()

    from planted_faults import margins_of

    rows = []
    with tempfile.TemporaryDirectory() as made:
        models = {Path(one).name: Path(one) for one in arguments.folder}
        for name in arguments.models.split(","):
            if name:
                models[name] = MODELS[name](Path(made) / name)
        for name, folder in models.items():
            for dtype in arguments.dtypes.split(","):
                rows += margins_of(name, folder, dtype, made)
    print(table(rows))


if __name__ == "__main__":
    main()
