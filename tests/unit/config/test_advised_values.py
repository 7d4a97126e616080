"""A setting that a page or a message advises has the value that is advised."""

import re
from pathlib import Path

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.config.load import load
from rlmath.config.settings import by_key

ROOT = Path(__file__).resolve().parents[3]
FILES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "rlmath").rglob("*.py")]
# `reward.on_error=skip`; values in braces of an f-string are left to the code.
ADVICE = re.compile(r"(?<![\w.])([a-z_]+(?:\.[a-z_0-9]+)+)=([A-Za-z_0-9]+)")


def wrong_advice(text):
    wrong = []
    for key, value in ADVICE.findall(text):
        setting = by_key().get(key)
        if setting is None or not setting.choices:
            continue
        if value not in setting.choices and not (setting.optional and value == "null"):
            wrong.append(f"{key}={value}: {setting.type_text}")
    return wrong


@pytest.mark.parametrize("folder", ["README.md", "docs", "rlmath"])
def test_values_of_choices_exist(folder):
    files = [file for file in FILES if file.relative_to(ROOT).parts[0] == folder]
    found = {str(file.relative_to(ROOT)): wrong_advice(file.read_text("utf-8")) for file in files}
    assert files
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_a_value_that_does_not_exist_is_found():
    assert wrong_advice("set reward.on_error=skip, or `data.malformed_rows=stop`.") == []
    assert wrong_advice("`reward.on_error=none`") == ["reward.on_error=none: one of stop, skip"]


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
