"""Differences of two runs: their settings, and the problems that one of them solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Problems of a list in the page.
MAX_PROBLEMS = 300
# Settings of where a run is written.
_NO_DIFFERENCE = ("runner.run_dir", "runner.resume", "runner.accept_changes")
_MISSING = "not a setting there"

Grades = Mapping[str, Mapping[str, Mapping[int, Sequence[int]]]]


def compare(settings: Sequence[Mapping[str, Any]], grades: Sequence[Grades]) -> dict[str, Any]:
    """Two runs beside each other, as JSON values. ``settings``: settings of each run, by full key.
    ``grades``: for each run, right and graded samples by kind, problem and step.

    Returns:
        ``settings``: ``[key, value, value]`` where they differ. ``problems``: by kind, for
        problems that both sampled, by each run's newest step that sampled the problem: how many
        ``both`` or ``neither`` solved (at least one right sample), and ``only``, for each run the
        ids that it alone solved, with ``more`` that the page leaves out.
    """
    first, second = settings
    differing = [
        [key, first.get(key, _MISSING), second.get(key, _MISSING)]
        for key in sorted({*first, *second})
        if key not in _NO_DIFFERENCE and first.get(key, _MISSING) != second.get(key, _MISSING)
    ]
    kinds = [kind for kind in grades[0] if kind in grades[1]]
    return {
        "settings": differing,
        "problems": {kind: _problems(grades[0][kind], grades[1][kind]) for kind in kinds},
    }


def _problems(
    first: Mapping[str, Mapping[int, Sequence[int]]],
    second: Mapping[str, Mapping[int, Sequence[int]]],
) -> dict[str, Any]:
    solved = [
        (id_, tuple(cells[id_][max(cells[id_])][0] > 0 for cells in (first, second)))
        for id_ in sorted(first.keys() & second.keys())
    ]
    only = [[id_ for id_, by in solved if by == who] for who in ((True, False), (False, True))]
    return {
        "both": sum(by == (True, True) for _, by in solved),
        "neither": sum(by == (False, False) for _, by in solved),
        "only": [ids[:MAX_PROBLEMS] for ids in only],
        "more": [max(0, len(ids) - MAX_PROBLEMS) for ids in only],
    }
