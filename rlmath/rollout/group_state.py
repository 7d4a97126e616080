"""Groups and samples as plain JSON values, for checkpoints of runs that keep some between steps."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.types import GradedSample, Group, Problem, Sample

# Fields of a sample that are tuples, which JSON has as lists.
_TUPLES = ("spans", "segments", "calls", "texts")
_ARRAYS: dict[str, Any] = {"token_ids": np.dtype("<i4"), "log_probs": np.dtype("<f4")}


def sample_to_state(sample: Sample) -> dict[str, Any]:
    """A sample, with its arrays in base64."""
    state = {f.name: getattr(sample, f.name) for f in dataclasses.fields(Sample)}
    for name, dtype in _ARRAYS.items():
        state[name] = _text(np.asarray(state[name], dtype))
    if (routes := sample.routes) is not None:
        state["routes"] = [_text(routes), routes.dtype.str, list(routes.shape)]
    return state | {
        name: [list(one) if isinstance(one, tuple) else one for one in state[name]]
        for name in _TUPLES
    }


def sample_from_state(state: Mapping[str, Any]) -> Sample:
    """Inverse of :func:`sample_to_state`."""
    given = dict(state) | {name: _array(state[name], dtype) for name, dtype in _ARRAYS.items()}
    if given["routes"] is not None:
        saved, dtype, shape = given["routes"]
        given["routes"] = _array(saved, np.dtype(dtype)).reshape(shape)
    return Sample(**with_tuples(given))


def with_tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a sample from JSON, with tuples for lists."""
    found = {
        name: tuple(tuple(one) if isinstance(one, list) else one for one in plain[name])
        for name in _TUPLES
        if name in plain
    }
    return {**plain, **found}


def response_tokens(state: Mapping[str, Any]) -> int:
    """Number of response tokens in the result of :func:`sample_to_state`."""
    return len(_array(state["token_ids"], _ARRAYS["token_ids"]))


def prompt_to_state(problem: Problem) -> dict[str, Any]:
    """The prompt that a group's responses continue; the rest of the problem is in the data."""
    ids = np.asarray(problem.prompt_token_ids, _ARRAYS["token_ids"])
    return {"prompt": problem.prompt, "prompt_token_ids": _text(ids)}


def with_saved_prompt(problem: Problem, state: Mapping[str, Any]) -> Problem:
    """The problem with the prompt of a group's state, so responses keep their prompt when a run
    resumes with another template or tokenizer."""
    ids = _array(state["prompt_token_ids"], _ARRAYS["token_ids"]).tolist()
    if tuple(ids) == problem.prompt_token_ids and state["prompt"] == problem.prompt:
        return problem
    return dataclasses.replace(problem, prompt=state["prompt"], prompt_token_ids=tuple(ids))


def group_to_state(group: Group) -> dict[str, Any]:
    """A group without its problem's other fields, which are in the data."""
    samples = [
        {
            "sample": sample_to_state(graded.sample),
            "reward": graded.reward,
            "correct": graded.correct,
            "status": graded.status,
            "answer": graded.answer,
            "rewards": dict(graded.rewards),
            "method": graded.method,
            "untabled": graded.untabled,
        }
        for graded in group.samples
    ]
    return {
        "problem_id": group.problem.id,
        **prompt_to_state(group.problem),
        "samples": samples,
    }


def group_from_state(state: Mapping[str, Any], problem: Problem) -> Group:
    """Inverse of :func:`group_to_state`. ``problem``: problem of the group, with the group's id,
    from the current data."""
    samples = tuple(
        GradedSample(
            sample_from_state(graded["sample"]),
            graded["reward"],
            graded["correct"],
            graded["status"],
            graded["answer"],
            graded["rewards"],
            graded["method"],
            graded["untabled"],
        )
        for graded in state["samples"]
    )
    return Group(with_saved_prompt(problem, state), samples)


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _array(saved: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array with its own memory."""
    return np.frombuffer(base64.b64decode(saved), dtype).copy()


def check_resumed_groups(config: Config, path: Path, sampler: Mapping[str, Any]) -> None:
    """Check the groups of a checkpoint that are still to be sampled or trained on, before anything
    is started. Raises UserError: engines or ranks would be set up for shorter responses than the
    groups have.

    Args:
        sampler: The sampler's state in it.
    """
    limit = config.rollout.max_response_tokens
    live = [max(group["max_tokens"]) for group in sampler.get("live", ())]
    waiting = [
        response_tokens(one["sample"])
        for _, group in sampler.get("carried_over", ())
        for one in group["samples"]
    ]
    longest = max([0, *live, *waiting])
    if longest > limit:
        what = (
            f"{len(live)} groups are unfinished, and their responses may have up to {longest}"
            if longest in live
            else f"a group that waits for training has a response of {longest}"
        )
        raise UserError(
            f"rollout.max_response_tokens={limit}: {path} was made with longer responses: {what} "
            f"tokens. Resume with rollout.max_response_tokens={longest} or more; "
            "algorithm.curriculum.length_stages can limit the responses of new groups"
        )
