"""Groups as plain JSON values, for the checkpoint of a run that keeps some for its next step."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmath.types import GradedSample, Group, Problem, Sample

_ARRAYS: dict[str, Any] = {"token_ids": np.dtype("<i4"), "log_probs": np.dtype("<f4")}


def group_to_state(group: Group) -> dict[str, Any]:
    """A group without its problem's text, which the data has; arrays in base 64."""
    samples = []
    for graded in group.samples:
        sample = {f.name: getattr(graded.sample, f.name) for f in dataclasses.fields(Sample)}
        for name, dtype in _ARRAYS.items():
            sample[name] = base64.b64encode(sample[name].astype(dtype).tobytes()).decode("ascii")
        samples.append(
            {
                "sample": sample,
                "reward": graded.reward,
                "correct": graded.correct,
                "status": graded.status,
                "answer": graded.answer,
                "rewards": dict(graded.rewards),
                "method": graded.method,
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
        arrays = {name: _array(graded["sample"][name], dtype) for name, dtype in _ARRAYS.items()}
        samples.append(
            GradedSample(
                Sample(**graded["sample"] | arrays),
                graded["reward"],
                graded["correct"],
                graded["status"],
                graded["answer"],
                graded["rewards"],
                graded.get("method"),  # Checkpoints of earlier versions have none.
            )
        )
    return Group(problem, tuple(samples))


def _array(saved: str | list[float], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in its own memory; checkpoints of earlier versions have lists."""
    if isinstance(saved, str):
        return np.frombuffer(base64.b64decode(saved), dtype).copy()
    return np.array(saved, dtype)
