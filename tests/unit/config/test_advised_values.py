"""A setting that a page or a message advises has the value that is advised."""

import re
from pathlib import Path

import pytest

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
