"""``summary.json``: the result of a run in one small object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmath.monitor.files import finite, replacing

SUMMARY_FILE = "summary.json"


def update_summary(run_dir: str | Path, values: Mapping[str, Any]) -> Path:
    """Set these keys of ``<run_dir>/summary.json`` and keep the others. ``values``: JSON values;
    floats that are not finite become ``null``. Returns the file, which readers see in its old or in
    its new state."""
    path = Path(run_dir) / SUMMARY_FILE
    merged = {**read_summary(run_dir), **finite(values)}
    with replacing(path) as file:
        file.write((json.dumps(merged, indent=2, ensure_ascii=False) + "\n").encode())
    return path


def read_summary(run_dir: str | Path) -> dict[str, Any]:
    """The keys of ``<run_dir>/summary.json``; none if it is not there."""
    path = Path(run_dir) / SUMMARY_FILE
    return json.loads(path.read_bytes()) if path.is_file() else {}
