"""Groups as plain JSON values, for the checkpoint of a run that keeps some for its next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlmath.types import GradedSample, Group, Problem, Sample


def group_to_state(group: Group) -> dict[str, Any]:
    """A group without its problem's text, which the data has."""
    samples = []
    for graded in group.samples:
        sample = {f.name: getattr(graded.sample, f.name) for f in dataclasses.fields(Sample)}
        sample["token_ids"] = list(graded.sample.token_ids)
        sample["log_probs"] = list(graded.sample.log_probs)
        samples.append(
            {
                "sample": sample,
                "reward": graded.reward,
                "correct": graded.correct,
                "status": graded.status,
                "answer": graded.answer,
                "rewards": dict(graded.rewards),
            }
        )
    return {"problem_id": group.problem.id, "samples": samples}


def group_from_state(state: Mapping[str, Any], problem: Problem) -> Group:
    """What :func:`group_to_state` was given.

    Args:
        state: Its result.
        problem: Of the group, with the group's id.
    """
    samples = []
    for graded in state["samples"]:
        sample = graded["sample"]
        samples.append(
            GradedSample(
                Sample(
                    **sample
                    | {
                        "token_ids": tuple(sample["token_ids"]),
                        "log_probs": tuple(sample["log_probs"]),
                    }
                ),
                graded["reward"],
                graded["correct"],
                graded["status"],
                graded["answer"],
                graded["rewards"],
            )
        )
    return Group(problem, tuple(samples))
