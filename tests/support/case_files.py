"""Tables of cases that are data: one case a line, in ``cases/`` beside the test."""

import json
from pathlib import Path

import pytest


def read_cases(test_file, name):
    """Lines of ``cases/NAME.jsonl`` beside a test's file; it has some."""
    path = Path(test_file).parent / "cases" / f"{name}.jsonl"
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert cases, f"{path} is empty: its test could not fail"
    return cases


def on_cases(arguments, test_file, name):
    """Run a test on each case: on its list of values for these arguments, named by the first."""
    cases = read_cases(test_file, name)
    return pytest.mark.parametrize(arguments, cases, ids=[str(case[0]) for case in cases])
