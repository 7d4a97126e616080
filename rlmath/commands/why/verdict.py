"""What the grader did with a response, again and step by step, and each reward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rlmath.commands.grade import REASONS
from rlmath.commands.why.batch import Step
from rlmath.config.reward import RewardItem
from rlmath.grading.extract import extract
from rlmath.grading.grader import MathGrader
from rlmath.grading.settings import TASKS

SOURCES = {
    "box": "the last \\boxed{}",
    "tag": "the answer tag",
    "marker": "what stands after 'the answer is'",
    "number": "the last number or option",
    "whole": "the whole response, which is nothing but an answer",
    "words": "the whole response, a few words",
    "none": "nowhere",
}


def verdict_lines(step: Step) -> Iterator[str]:
    """The grader's verdict as noted, and its way to it, done again."""
    row, settings = step.row, step.config.reward
    status, method = row.get("status"), row.get("method")
    if status == "ungraded":
        yield "no reward asked the grader about this sample"
        return
    yield (
        f"noted: {status}, answer {row.get('answer')!r}, accepted {row.get('accepted')}; "
        f"{_reason(str(method))}"
    )
    task = _task(settings.items)
    # Its process starts when SymPy is asked.
    grader = MathGrader(1, settings.timeout_s, fallback=settings.fallback.value)
    with contextlib.closing(grader):
        for gold in row.get("accepted") or ():
            report = grader.check_gold(gold, task)
            what = report.kind if report.usable else f"cannot be used: {report.problem}"
            yield f"accepted {gold!r}: {what}"
        found = extract(row["response"], settings.fallback, task=task)
        where = SOURCES[found.source]
        yield f"answer taken from: {where} (reward.fallback={settings.fallback.value})"
        for gold in row.get("accepted") or ():
            one = grader.grade_one(row["response"], gold, task=task)
            yield f"against {gold!r}: {one.status}; {_reason(one.method)}"
        grade = grader.grade_one(row["response"], row.get("accepted") or [], task=task)
    noted = (status, row.get("answer"), method)
    now = (grade.status, grade.answer, grade.method)
    if noted == now:
        yield "graded again: the same verdict"
    else:
        yield (
            f"graded again: {grade.status}, answer {grade.answer!r}, by {grade.method}; the noted "
            "verdict is another one (a time limit, a reward's own params, or another version)"
        )


def reward_lines(step: Step) -> Iterator[str]:
    """Each reward with its weight, up to the total."""
    row, items = step.row, step.config.reward.items
    rewards: Mapping[str, Any] = row.get("rewards") or {}
    total = row.get("reward")
    # A mix writes its rewards in the order of its items.
    weights = (
        [item.weight for item in items] if len(items) == len(rewards) else [1.0] * len(rewards)
    )
    added = 0.0
    for (name, value), weight in zip(rewards.items(), weights, strict=True):
        if value is None:
            yield f"{name}: could not score it"
            continue
        added += weight * value
        yield f"{name}: {value:g} × weight {weight:g} = {weight * value:g}"
    if total is None:
        yield "total: none; it takes no part in its group's statistics nor in the loss"
        return
    rest = total - added
    if abs(rest) > 1e-9 * max(1.0, abs(total)):
        algorithm = step.config.algorithm
        yield f"algorithm.truncated={algorithm.truncated.value}: {rest:+g}"
    yield f"total: {total:g}"


def _reason(method: str) -> str:
    return f"the layer {method} decided: {REASONS.get(method, method)}"


def _task(items: list[RewardItem]) -> str:
    """Of the first reward that says one."""
    given = [item.params.get("task") for item in items]
    return next((task for task in given if task in TASKS), "math")
