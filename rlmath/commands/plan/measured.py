"""Values that plans assume, each with the run in which it was measured.

``measured.json`` is the only place of these numbers. ``rlmath selfcheck gpu --append`` corrects it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("measured.json")
# Figures of a selfcheck whose name begins so are values of the table.
FIGURE = "plan: "


def read_table(path: Path = TABLE) -> dict[str, dict[str, float | str]]:
    """By name, ``value`` and ``run``; a run of "assumed" was none."""
    found: dict[str, dict[str, float | str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def correct(found: Mapping[str, float], run: str, path: Path = TABLE) -> None:
    """Replace values by measured ones. Raises KeyError: the table has no such name."""
    table = read_table(path)
    for name, value in found.items():
        if name not in table:
            raise KeyError(name)
        table[name] = {"value": float(f"{value:.3g}"), "run": run}
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


MEASURED = {name: float(entry["value"]) for name, entry in read_table().items()}
