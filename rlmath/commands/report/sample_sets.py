"""One pass over a run's samples: figures over all of them, and some to look at.

Rows are forgotten unless they are chosen, so memory does not grow with the run.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmath.commands.report.tokens import Traces
from rlmath.monitor.run_folder import TRAINING, RunFolder
from rlmath.monitor.samples import cut_text, data_id, priority

# Shares of the quantiles of lengths and rewards.
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MAX_PROBLEMS = 150  # of a heat map
MAX_COLUMNS = 80  # of a heat map; more steps share one
MAX_TEXT = 40_000  # characters of a prompt or a response in the page
# Rough size of a sample's other fields in the page.
_FIELDS_BYTES = 500
_TOKEN_BYTES = 60
BY_TOKEN = ("token_ids", "log_probs", "trace")
# Share of the bytes for values by token that is reserved for the last step.
_FOR_THE_LAST = 1 / 8


@dataclass
class StepFigures:
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    truncated: int = 0  # Samples cut off at the limit.

    def add(self, row: Mapping[str, Any]) -> None:
        self.lengths.append(row["response_tokens"])
        if isinstance(row.get("reward"), int | float):
            self.rewards.append(row["reward"])
        self.statuses[str(row.get("status"))] += 1
        self.truncated += row.get("finish_reason") == "length"


@dataclass
class Samples:
    """The result of a pass over a run's samples."""

    figures: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    # Right and graded samples by kind, problem and step.
    grades: dict[str, dict[str, dict[int, list[int]]]] = field(default_factory=dict)
    # Samples to show, in the order of the files.
    chosen: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut_texts: int = 0  # Characters of shown samples that the page leaves out.
    left_out_tokens: int = 0  # Samples that are shown without their values per token.
    token_bytes: int = 0  # Approximate bytes of values per token in the page.


def read_samples_of(run: RunFolder, budget_bytes: int, token_bytes: int = 10**9) -> Samples:
    """Read every samples file of a run.

    Args:
        budget_bytes: Limit of the chosen samples' texts in the page.
        token_bytes: Limit of their values by token. Where they are too many, samples of some steps
            have none; those that have are spread over the run.

    Returns:
        Figures over all samples, and from each file the complete groups of a few problems. These
        are chosen by their ids, so a problem is shown in every step that sampled it, and in both
        of two compared runs.
    """
    found, traces = Samples(), Traces(run.folder)
    left = float(budget_bytes)
    for number, file in enumerate(run.samples):
        quota = left / (len(run.samples) - number)
        groups: dict[str, list[dict[str, Any]]] = {}
        figures = StepFigures()
        grades = found.grades.setdefault(file.kind, {})
        for row in run.rows(file):
            figures.add(row)
            problem = data_id(row["problem_id"])
            if isinstance(row.get("correct"), bool):
                cell = grades.setdefault(problem, {}).setdefault(file.step, [0, 0])
                cell[0] += row["correct"]
                cell[1] += 1
            groups.setdefault(row["problem_id"], []).append(row | {"kind": file.kind})
        found.figures.setdefault(file.kind, {})[file.step] = _summary(figures)
        share = (number + 1) / len(run.samples)
        share = 1.0 if share == 1 else share * (1 - _FOR_THE_LAST)
        of_kind = traces if file.kind == TRAINING else None
        shown, used = _choose(groups.values(), quota, found, of_kind, share * token_bytes)
        left -= used
        found.chosen += shown
        missing = sum(map(len, groups.values())) - len(shown)
        found.left_out[file.kind] = found.left_out.get(file.kind, 0) + missing
    return found


def quantiles(values: Sequence[float]) -> list[float]:
    """The values at ``QUANTILES``, by linear interpolation; empty without values."""
    return [float(np.quantile(values, share)) for share in QUANTILES] if values else []


def heat_map(grades: Mapping[str, Mapping[int, Sequence[int]]]) -> dict[str, Any]:
    """Right and graded samples by problem and column of steps.

    Problems that most steps sampled come first; all rows have the same columns.

    Returns:
        ``columns``: ``[first step, last step]`` each; ``rows``: ``id`` and ``cells`` of
        ``[column, right, graded]``; ``left_out``: problems that are not among the rows.
    """
    steps = sorted({step for cells in grades.values() for step in cells})
    width = max(1, math.ceil(len(steps) / MAX_COLUMNS))
    columns = [steps[i : i + width] for i in range(0, len(steps), width)]
    column_of = {step: index for index, column in enumerate(columns) for step in column}
    problems = sorted(grades, key=lambda id_: (-len(grades[id_]), priority(id_)))
    rows = []
    for problem in problems[:MAX_PROBLEMS]:
        cells: dict[int, list[int]] = {}
        for step, (right, graded) in grades[problem].items():
            cell = cells.setdefault(column_of[step], [0, 0])
            cell[0] += right
            cell[1] += graded
        rows.append({"id": problem, "cells": [[c, *cells[c]] for c in sorted(cells)]})
    return {
        "columns": [[column[0], column[-1]] for column in columns],
        "rows": rows,
        "left_out": max(0, len(problems) - MAX_PROBLEMS),
    }


def _summary(figures: StepFigures) -> dict[str, Any]:
    count = len(figures.lengths)
    rewards = figures.rewards
    return {
        "samples": count,
        "lengths": quantiles(figures.lengths),
        "rewards": quantiles(rewards),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "truncated": figures.truncated / count if count else None,
        "statuses": dict(figures.statuses),
    }


def _group_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    mean = statistics.fmean(rewards) if rewards else None
    spread = statistics.stdev(rewards) if len(rewards) > 1 else None
    right = sum(row.get("correct") is True for row in rows)
    return {"of_group": {"size": len(rows), "right": right, "mean": mean, "deviation": spread}}


def _choose(
    groups: Iterable[list[dict[str, Any]]],
    quota: float,
    found: Samples,
    traces: Traces | None,
    token_bytes: float,
) -> tuple[list[dict[str, Any]], float]:
    """Groups in the order of their priority until the quota is used, at least one sample; with
    long texts cut."""
    chosen: list[dict[str, Any]] = []
    used = 0.0
    for group in sorted(groups, key=lambda rows: priority(rows[0]["problem_id"])):
        of_group = _group_figures(group)
        for row in group:
            whole = [row["prompt"], *(text for _, _, text in _parts(row))]
            cut = [cut_text(text, MAX_TEXT) for text in whole]
            texts = [text for text, _ in cut]
            takes = _FIELDS_BYTES + sum(len(json.dumps(text)) for text in texts)
            if chosen and used + takes > quota:
                return chosen, used
            row = _with_tokens(row, found, traces, token_bytes)
            parts = [(*part[:2], text) for part, text in zip(_parts(row), texts[1:], strict=True)]
            chosen.append(row | of_group | {"prompt": texts[0], "parts": parts})
            found.cut_texts += sum(left_out for _, left_out in cut)
            used += takes
    return chosen, used


def _parts(row: Mapping[str, Any]) -> list[tuple[bool, int, str]]:
    """A response's parts: whether the model wrote it, tokens, and text. The text
    between two turns is one part."""
    segments = row.get("segments") or [("model", row["response_tokens"], row["response"])]
    found = []
    for is_own, group in itertools.groupby(segments, lambda one: one[0] == "model"):
        part = list(group)
        found.append((is_own, sum(one[1] for one in part), "".join(one[2] for one in part)))
    return found


def _with_tokens(
    row: dict[str, Any], found: Samples, traces: Traces | None, token_bytes: float
) -> dict[str, Any]:
    trace = None if traces is None else traces.of(row)
    if trace is None and not row.get("token_ids"):
        return row
    takes = _TOKEN_BYTES * int(row["response_tokens"])
    if found.token_bytes + takes > token_bytes:
        found.left_out_tokens += 1
        return {key: value for key, value in row.items() if key not in BY_TOKEN}
    found.token_bytes += takes
    return row | {"trace": trace}
