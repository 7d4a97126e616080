"""The interface of a reward, and helpers that rewards share.

A reward is a callable ``f(completions, **columns) -> list[float | None]``, the signature of TRL's
GRPOTrainer and of Open-R1. ``completions`` are strings or lists of chat messages; every other
column (``completion_ids``, ``finish_reason``, ``solution``, the fields of the data row) comes by
keyword, one value per completion. ``None`` means that the reward cannot score that completion.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from rlmath.errors import ConfigError, UserError

Value = float | None
Values = list[Value]
Range = tuple[float, float]

GOLD_COLUMNS = ("answers", "solution", "solutions", "answer", "label", "labels")


class RewardSettingError(ConfigError, ValueError):
    """Invalid setting of a reward, or invalid data for it."""


class RewardError(UserError, RuntimeError):
    """A reward raised an exception or returned something invalid.

    The command prints the message without a traceback; the cause is chained.
    """


class Reward:
    """Base of the rewards in this package.

    Attributes:
        needs_group: The reward compares a problem's completions, so one call must have all of
            them. False: a call may have any part of a group.
        needs_tokens: The reward counts tokens and needs ``completion_ids``.
        thread_safe: The reward may be called from several threads at once.
        is_asynchronous: The reward waits for something external, such as a server.
            :meth:`submit` returns immediately, so no thread is blocked.
    """

    needs_group: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = False
    thread_safe: ClassVar[bool] = True
    is_asynchronous: ClassVar[bool] = False
    __name__: str = "reward"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        """One value per completion, in order; ``None`` where it cannot be scored."""
        raise TypeError(f"{type(self).__name__} defines no __call__")

    @property
    def value_range(self) -> Range | None:
        """Lowest and highest value; ``None`` if unknown. A constant is a class attribute."""
        return None

    def submit(self, completions: Sequence[Any], **columns: Any) -> Future[Values]:
        """The values of a call, later. Only asynchronous rewards have it."""
        raise TypeError(f"{type(self).__name__} is not asynchronous")

    def probe(self) -> None:
        """Check before a run starts that the reward can work.

        Raises:
            RewardSettingError: It cannot work; the message says what is missing.
        """

    def drain_metrics(self) -> dict[str, float]:
        """Return the reward's own metrics since the last call, by short name."""
        return {}

    def close(self) -> None:
        """Release processes, threads and files. May be called twice."""

    def __enter__(self) -> Reward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_of(message_or_text: Any) -> str:
    """The text of one completion or prompt.

    Args:
        message_or_text: A string, a chat message, or a list of messages. The assistant's messages
            are joined (all messages if there are none of the assistant). A message's content may
            be a list of parts, whose ``text`` is joined.

    Raises:
        RewardSettingError: Any other type.
    """
    if isinstance(message_or_text, str):
        return message_or_text
    if message_or_text is None:
        return ""
    if isinstance(message_or_text, Mapping):
        content = message_or_text.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        return "".join(
            part if isinstance(part, str) else str(part.get("text", "")) for part in content
        )
    if isinstance(message_or_text, Sequence) and all(
        isinstance(m, Mapping) for m in message_or_text
    ):
        of_assistant = [m for m in message_or_text if m.get("role", "assistant") == "assistant"]
        return "\n".join(text_of(m) for m in (of_assistant or message_or_text))
    raise RewardSettingError(
        f"a completion is a string or a list of chat messages, not {type(message_or_text).__name__}"
        f" ({str(message_or_text)[:60]!r})"
    )


def prompt_text_of(prompt: Any) -> str:
    """The text of a prompt. Chat messages are joined with line breaks."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return "\n".join(text_of(message) for message in prompt)
    return text_of(prompt)


def texts_of(completions: Sequence[Any]) -> list[str]:
    return [text_of(completion) for completion in completions]


def is_token_ids(value: Any) -> bool:
    """Whether a completion is a nonempty list of token ids, as TRL passes it."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(v, int) for v in value)
    )


def token_lists(completion_ids: Sequence[Any]) -> list[Sequence[int]]:
    """Token ids of each completion as plain integers, for code that expects TRL's lists."""
    return [ids.tolist() if hasattr(ids, "tolist") else ids for ids in completion_ids]


def token_counts(
    reward: str, completions: Sequence[Any] | None, completion_ids: Sequence[Any] | None
) -> list[int]:
    """Length of each completion in tokens.

    Without token ids, characters are counted, with a warning. Only a manual call gets there;
    ``RewardMix`` always has token ids.
    """
    if completion_ids is not None:
        if completions is not None and len(completion_ids) != len(completions):
            raise RewardSettingError(
                f"{reward}: completion_ids has {len(completion_ids)} entries for "
                f"{len(completions)} completions"
            )
        return [len(ids) for ids in completion_ids]
    if completions is None:
        raise RewardSettingError(f"{reward}: give completion_ids, the token ids of each completion")
    if completions and all(is_token_ids(c) for c in completions):
        return [len(c) for c in completions]
    warnings.warn(
        f"{reward}: no completion_ids given, so lengths are characters and not tokens", stacklevel=3
    )
    return [len(text) for text in texts_of(completions)]


def column(reward: str, columns: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    """Return the column ``name``, which must have ``count`` values.

    Raises:
        RewardSettingError: It is missing or has another length.
    """
    if columns.get(name) is None:
        have = ", ".join(sorted(k for k, v in columns.items() if v is not None)) or "none"
        raise RewardSettingError(
            f"{reward}: the column {name!r} is missing; columns given: {have}. "
            f"Add it to the data's rows."
        )
    values = columns[name]
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        # One value for all completions, which a manual call may pass.
        return [values] * count
    if len(values) != count:
        raise RewardSettingError(
            f"{reward}: the column {name!r} has {len(values)} values for {count} completions"
        )
    return values


def golds_of(reward: str, columns: Mapping[str, Any], count: int) -> list[list[str]]:
    """Accepted answers of each completion's problem, from the first gold column present.

    Returns:
        ``count`` lists; empty for a row without accepted answers.
    """
    for name in GOLD_COLUMNS:
        if columns.get(name) is not None:
            return [_as_answers(v) for v in column(reward, columns, name, count)]
    have = ", ".join(sorted(columns)) or "none"
    raise RewardSettingError(
        f"{reward}: no column with the accepted answers; one of {', '.join(GOLD_COLUMNS)} is "
        f"needed, the columns given are: {have}"
    )


def _as_answers(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str | int | float):
        return [str(value)]
    return [str(v) for v in value if v is not None]


def problem_keys(columns: Mapping[str, Any], count: int) -> list[str]:
    """A comparable key of each completion's problem.

    Taken from the first column present: ``problem_id``, ``prompts``, ``prompt``, then the
    accepted answers (different answers mean different problems). Without any of them, all
    completions belong to one problem.
    """
    for name in ("problem_id", "group_id", "prompts", "prompt", *GOLD_COLUMNS):
        values = columns.get(name)
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count:
            return [json.dumps(v, sort_keys=True, default=str) for v in values]
    return [""] * count


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The columns as one mapping per completion; columns of another length are left out."""
    usable = {
        name: values
        for name, values in columns.items()
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    }
    return [{name: values[i] for name, values in usable.items()} for i in range(count)]


def check_values(reward: str, values: Any, count: int) -> Values:
    """Convert a reward's return value, a list, tuple, NumPy array or tensor of ``count`` numbers or
    ``None``, to ``list[float | None]``.

    NaN and infinity become ``None``, because one of them would make the whole group's statistics
    useless.

    Raises:
        RewardError: The length differs, or an entry is not a number.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, int | float) and count == 1:
        values = [values]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(
            f"reward {reward}: returned {type(values).__name__}, a list of {count} numbers or None "
            f"was expected"
        )
    if len(values) != count:
        raise RewardError(f"reward {reward}: returned {len(values)} values for {count} completions")
    result: Values = []
    for value in values:
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward {reward}: returned {value!r}, which is neither a number nor None"
            ) from error
        result.append(number if number is not None and math.isfinite(number) else None)
    return result
