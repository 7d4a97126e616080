"""Methods that docs/algorithms.md says are combinations of settings: they compose."""

import re
from pathlib import Path

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.config.load import load

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"
METHODS = ("LUSPO", "ScaleRL", "decoupled PPO", "TIS-REINFORCE", "DPPO of prime-rl")


def read_table():
    """Method to settings, from the rows of the page's table."""
    rows = re.findall(r"^\| \*\*(.+?)\*\*.*?\|.*?\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.M)
    return {name: settings.split() for name, settings in rows}


def compose(method):
    return load([*read_table()[method], "model=tiny", "runner.run_dir=r"])


def test_the_page_has_them_all():
    assert tuple(read_table()) == METHODS


@pytest.mark.parametrize("method", METHODS)
def test_published_method_passes_checks_and_reads_every_setting(method):
    config = compose(method)
    assert list(algorithm_problems(config)) == []
    assert config.algorithm.early_stop_ratio is None
