"""docs/coming_from.md: every setting, option and reward that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.losses import LOSSES
from rlmath.config.options import SECTIONS
from rlmath.config.settings import by_key

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
CHOICES = {
    "algorithm.advantage": ADVANTAGES.names(),
    "algorithm.loss": LOSSES.names(),
    "algorithm.aggregation": AGGREGATIONS.names(),
}


def right_columns() -> list[str]:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [right for _, right in rows if right != "rlmath"]


def test_every_name_on_the_right_exists() -> None:
    options = {
        setting.key
        for section in SECTIONS
        for name in section.registry.names()
        for setting in section.settings(name)
    }
    known = by_key().keys() | options
    seen = 0
    for right in right_columns():
        section = ""
        for span in re.findall(r"`([^`]+)`", right):
            key, _, value = span.partition("=")
            if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) or key == "recipe":
                continue
            if "." in key:
                section = key.rpartition(".")[0]
                assert key in known, span
                seen += 1
            elif section and f"{section}.{key}" in known:
                seen += 1
            elif not value and key in {name for names in CHOICES.values() for name in names}:
                seen += 1  # Further values of the setting before.
            if key in CHOICES and value and ":" not in value:  # A file's function.
                assert value in CHOICES[key], span
    assert seen > 60
