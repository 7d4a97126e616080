"""The driver's state as JSON: it is read back exactly as written, and nothing is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmath.checkpoint.manifest import write_json

DRIVER_STATE = "driver_state.json"


def write_driver_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's state. Raises TypeError: something in it would come back as something
    else; the message says what and where."""
    _check(state, "state")
    write_json(folder / DRIVER_STATE, state)


def read_driver_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / DRIVER_STATE).read_text(encoding="utf-8"))


def _check(value: Any, where: str) -> None:
    """JSON has strings for keys and lists for tuples; quietly turning one into the other would
    resume a run with something that it did not save."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}; JSON has strings for keys")
            _check(inner, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, inner in enumerate(value):
            _check(inner, f"{where}[{index}]")
    # Floats come back bit by bit, infinity and NaN among them: Python's JSON knows those.
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(
            f"{where} is a {type(value).__name__}; the driver's state takes dict, list, str, int, "
            "float, bool and None"
        )
