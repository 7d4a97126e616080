"""Public configurations as facts: whose file, their settings, and what becomes of them.

``expected`` is what differs from the import of a file that sets nothing (for TRL: on 8 processes).
"""

import json
from pathlib import Path

import pytest

from rlmath.commands.importing.cli import FRAMEWORKS
from rlmath.commands.importing.fact import translate

HERE = Path(__file__).parent


def cases():
    """Framework and facts of each configuration."""
    return [
        pytest.param(name, json.loads(line), id=f"{name}-{number}")
        for name in ("verl", "TRL", "OpenRLHF")
        for number, line in enumerate((HERE / f"{name.lower()}.jsonl").read_text().splitlines())
    ]


def base_of(name):
    """The settings of a file that sets nothing."""
    return translate(FRAMEWORKS[name], {"processes": 8} if name == "TRL" else {}).settings
