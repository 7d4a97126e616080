"""Columns that rewards receive with the completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlmath.rewards.answers import GRADES_COLUMN
from rlmath.rewards.base import token_lists
from rlmath.rewards.scored import Partial
from rlmath.types import Problem, Sample

# Passed to user functions in addition to the columns of ``group_columns``.
ADDED_COLUMNS = {"completions", "solution", "trainer_state", "log_metric", "log_extra"}
# Fields of the data that would shadow a parameter.
_RESERVED_FIELDS = {
    *("completions", "prescored", "self", "prompt_messages", "environment_reward"),
    GRADES_COLUMN,
}


def group_columns(problem: Problem, samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns that rewards receive for samples of one problem.

    The data row's fields, including prompt and answer, keep their names and values. The others are
    TRL's names, ``finish_reason``, ``answers`` (the accepted answers), ``problem_id``, with a chat
    template ``prompt_messages`` (the messages that ``prompts`` are rendered from), and with an
    environment that gives rewards ``environment_reward``. A field of the row that has one of these
    names, or the name of a parameter of :meth:`RewardMix.score`, is dropped.
    """
    count = len(samples)
    columns: dict[str, Any] = {
        name: [value] * count
        for name, value in problem.columns.items()
        if name not in _RESERVED_FIELDS
    }
    columns.update(
        prompts=[problem.prompt] * count,
        completion_ids=[s.token_ids for s in samples],
        finish_reason=[s.finish_reason for s in samples],
        answers=[list(problem.answers)] * count,
        problem_id=[problem.id] * count,
    )
    if any(s.environment_reward is not None for s in samples):
        columns["environment_reward"] = [s.environment_reward for s in samples]
    if problem.messages is not None:
        columns["prompt_messages"] = [problem.messages] * count
    return columns


def function_columns(
    columns: Mapping[str, Any],
    texts: Sequence[str],
    completion_format: Literal["chat", "text"],
    partials: Sequence[Partial],
    *,
    trainer_state: Any,
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """Keyword arguments that TRL's trainer would pass to a reward function.

    Lists and dicts are copied for each call, so a function that modifies them (``tests.pop()``)
    does not affect the next sample, reward or epoch.

    Args:
        completion_format: ``chat``: completions and prompts as message lists.
        partials: Receive the columns that the function logs with ``log_extra``.
    """
    completions: list[Any] = list(texts)
    if completion_format == "chat":
        completions = [[{"role": "assistant", "content": t}] for t in texts]
    extended: dict[str, Any] = {
        **{name: own_copy(values) for name, values in columns.items()},
        "trainer_state": trainer_state,
        "log_metric": log_metric,
        "log_extra": _extra_logger(partials),
    }
    if "completion_ids" in extended:
        extended["completion_ids"] = token_lists(extended["completion_ids"])
    extended.setdefault("prompts", [""] * len(texts))
    if completion_format == "chat":
        prompts = extended.get("prompt_messages", extended["prompts"])
        extended["prompts"] = [_as_messages(prompt) for prompt in prompts]
    if "solution" not in extended and "answers" in extended:
        extended["solution"] = [
            a[0] if not isinstance(a, str) and len(a) == 1 else a for a in extended["answers"]
        ]
    return {**extended, "completions": completions}


def own_copy(value: Any) -> Any:
    """Copy lists and dicts recursively; arrays and token ids are not copied."""
    if isinstance(value, list):
        return [own_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    return value


def _as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as TRL's conversational data, copied; a plain text becomes a user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _extra_logger(partials: Sequence[Partial]) -> Callable[[str, Sequence[Any]], None]:
    def log_extra(name: str, values: Sequence[Any]) -> None:
        for partial, value in zip(partials, values, strict=False):
            partial.extra[name] = value

    return log_extra
