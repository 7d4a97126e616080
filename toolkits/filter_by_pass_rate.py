"""Keep the problems that a model solves sometimes: not always, and not never.

    python toolkits/filter_by_pass_rate.py datasets/dapo.jsonl --to datasets/dapo_mid.jsonl \\
        --least 0.05 --most 0.9 model.path=models/Qwen2.5-1.5B runner.run_dir=runs/filter \\
        eval.samples=8

Samples with vLLM and grades as `rlmath evaluate` does, with the settings that are given; called
again after an interruption it resumes. Each row that is kept has its `pass_rate`; a problem none of
whose samples could be judged is left out and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlmath.checks import run as checks
from rlmath.checks.machine import Machine
from rlmath.config import load
from rlmath.config.quoting import quoted_path
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.monitor.files import refuse_existing, replacing
from rlmath.monitor.samples import read_samples
from rlmath.utils.command_line import run_command


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="problems, read by data.prompt_key and answer_key")
    parser.add_argument("--to", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    parser.add_argument("--least", type=float, default=0.01, help="pass rate (default 0.01)")
    parser.add_argument("--most", type=float, default=0.99, help="pass rate (default 0.99)")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    refuse_existing("--to", [arguments.to], overwrite=arguments.overwrite)
    config = load.load([*arguments.settings, f"data.eval_paths=[{quoted_path(arguments.file)}]"])
    checks.check(config, "evaluate", Machine.here())
    from rlmath.commands import evaluate

    evaluate.run(config)
    rates = pass_rates(Path(config.runner.run_dir) / "evaluation" / "samples")
    kept, unknown = [], 0
    for row in read_rows([arguments.file]):
        if isinstance(row.fields, MalformedRowError) or row.place not in rates:
            unknown += 1
        elif arguments.least <= rates[row.place] <= arguments.most:
            kept.append(row.fields | {"pass_rate": rates[row.place]})
    with replacing(arguments.to) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in kept)
    below = sum(rate < arguments.least for rate in rates.values())
    above = sum(rate > arguments.most for rate in rates.values())
    print(
        f"{arguments.to}: {len(kept)} problems kept; {below} below {arguments.least}, "
        f"{above} above {arguments.most}, {unknown} not sampled or not judged"
    )
    return 0


def pass_rates(samples: Path) -> dict[str, float]:
    """Problem to the share of its judged samples that are right."""
    judged: dict[str, list[bool]] = defaultdict(list)
    (path,) = samples.glob("eval_000000.jsonl*")
    for row in read_samples(path):
        if row["status"] in ("correct", "wrong", "no_answer"):
            judged[row["problem_id"]].append(bool(row["correct"]))
    return {problem: sum(values) / len(values) for problem, values in judged.items()}


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
