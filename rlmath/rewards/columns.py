"""The columns that rewards get beside the completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlmath.rewards.answers import GRADES_COLUMN
from rlmath.rewards.base import token_lists
from rlmath.rewards.scored import Partial
from rlmath.types import Problem, Sample

# What a function from elsewhere gets beside the columns of ``group_columns``.
ADDED_COLUMNS = {"completions", "solution", "trainer_state", "log_metric", "log_extra"}
# Fields of the data that would be taken for something else.
_RESERVED_FIELDS = {"completions", "prescored", "self", "prompt_messages", GRADES_COLUMN}


def group_columns(problem: Problem, samples: Sequence[Sample]) -> dict[str, Any]:
    """The columns that rewards get for samples of one problem.

    The data row's own fields, prompt and answer included, keep their names and values; the rest
    are TRL's names, ``finish_reason``, ``answers`` (the accepted answers), ``problem_id``, and
    under a chat template ``prompt_messages`` (what ``prompts`` are rendered from). A field of the
    row that has one of these names, or that of a parameter of :meth:`RewardMix.score`, is not
    passed on.
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
    """What TRL's trainer would give a reward function, by keyword.

    Every list and dict in it is the function's own for this one call: what it changes, as in
    ``tests.pop()``, is unchanged for the next sample, the next reward and the next epoch.

    Args:
        columns: Those of the samples.
        texts: The completions.
        completion_format: ``chat``: completions and prompts as message lists.
        partials: Take what the function notes with ``log_extra``.
        trainer_state: With the step.
        log_metric: Takes a name and a number.
    """
    completions: list[Any] = list(texts)
    if completion_format == "chat":
        completions = [[{"role": "assistant", "content": t}] for t in texts]
    extended: dict[str, Any] = {
        **{name: _own_copy(values) for name, values in columns.items()},
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


def _own_copy(value: Any) -> Any:
    """The same value with separate lists and dicts; arrays and token ids are not copied."""
    if isinstance(value, list):
        return [_own_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    return value


def _as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as TRL's conversational data has it, for the function to keep; a text is the
    user's."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _extra_logger(partials: Sequence[Partial]) -> Callable[[str, Sequence[Any]], None]:
    def log_extra(name: str, values: Sequence[Any]) -> None:
        for partial, value in zip(partials, values, strict=False):
            partial.extra[name] = value

    return log_extra
