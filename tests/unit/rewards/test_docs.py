"""docs/rewards.md against the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rlmath.rewards import available_rewards
from rlmath.rewards.answers import AnswerGrader
from rlmath.rewards.registry import reward_class, settings_of
from rlmath.rewards.sandbox.local import LEVELS

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def rows(text: str) -> dict[str, str]:
    """Rows of tables, by the names in their first cell."""
    return {
        name: row
        for row in text.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


ROWS = rows(PAGE) | rows(PAGE.split("## Built-in rewards")[1].split("\n### ")[0])
GRADING = ("num_workers", "timeout_s", "fallback", "task")
RUNNING = ("provider", "provider_settings", "num_parallel", "cpu_s", "memory_mib")


@pytest.mark.parametrize("name", available_rewards())
def test_each_reward_has_a_row_with_its_settings(name):
    if name == "remote":
        assert "`urls`" in ROWS[name]
        return
    handed_on = {*GRADING, *RUNNING, "grader", "answer_grader"}
    settings = set(settings_of(reward_class(name)))
    for setting in settings - handed_on:
        assert f"`{setting}`" in ROWS[name], f"{name} has the setting {setting}"
    assert ("grading" in ROWS[name]) == ("fallback" in settings)


@pytest.mark.parametrize("name", available_rewards())
def test_each_reward_says_where_it_is_from(name):
    module = inspect.getmodule(reward_class(name))
    assert module is not None and module.__doc__ is not None
    assert re.search(r"arXiv \d{4}\.\d{5}|Open-R1|OpenRLHF", module.__doc__), module.__name__


def test_shared_settings_and_levels_are_there():
    for setting in (*GRADING, *RUNNING):
        assert f"`{setting}`" in PAGE
    assert set(inspect.signature(AnswerGrader).parameters) == {*GRADING, "grader"}
    assert set(LEVELS) <= set(ROWS)
