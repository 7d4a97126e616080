"""What a run reads of each row: the prompt as text, and the answers or the response.

The loader and ``--check`` read rows here, so that a row that one of them takes is no error of the
other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlmath.config.schema import DataConfig, MalformedRow
from rlmath.data.answers import accepted_answers
from rlmath.data.files import MalformedRowError, Row
from rlmath.data.prompts import PromptRenderer
from rlmath.errors import UserError
from rlmath.types import Problem


@dataclass(frozen=True)
class Target:
    """The field beside the prompt.

    Attributes:
        setting: That names the field, for messages.
        key: The field's name.
        read: Makes the answers or the response of what is in it.
    """

    setting: str
    key: str
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Draft:
    """A readable row before tokenization; ``target`` is its answers or its response."""

    place: str
    prompt: str
    target: Any
    fields: dict[str, Any]


def answers_in(key: str, setting: str = "data.answer_key") -> Target:
    """Accepted answers, see :func:`rlmath.data.answers.accepted_answers`."""
    return Target(setting, key, accepted_answers)


def responses_in(key: str, setting: str = "sft.response_key") -> Target:
    """Responses to imitate."""
    return Target(setting, key, _response)


def usable_rows(
    rows: Iterable[Row], settings: DataConfig, renderer: PromptRenderer, target: Target
) -> tuple[list[Draft], list[str]]:
    """The rows that can be read, and why each of the others was skipped.

    Raises:
        UserError: A malformed row, unless ``malformed_rows`` is ``skip``.
    """
    drafts: list[Draft] = []
    skipped: list[str] = []
    for row in rows:
        try:
            if isinstance(row.fields, MalformedRowError):
                raise row.fields
            prompt = _field(row.fields, "data.prompt_key", settings.prompt_key, renderer.render)
            value = _field(row.fields, target.setting, target.key, target.read)
        except MalformedRowError as error:
            message = f"{row.place}: {error}"
            if settings.malformed_rows is MalformedRow.stop:
                raise UserError(
                    f"{message}. Fix the row, or leave such rows out with data.malformed_rows=skip"
                ) from error
            skipped.append(message)
            continue
        drafts.append(Draft(row.place, prompt, value, row.fields))
    return drafts, skipped


def problem_of(
    draft: Draft, token_ids: tuple[int, ...], settings: DataConfig, renderer: PromptRenderer
) -> Problem:
    """The problem of a row with answers."""
    messages = None
    if settings.apply_chat_template:
        messages = tuple(renderer.messages(draft.fields[settings.prompt_key]))
    return Problem(draft.place, draft.prompt, token_ids, draft.target, draft.fields, messages)


def read_value(value: Any, read: Callable[[Any], Any]) -> Any:
    """What ``read`` makes of a field's value.

    Raises:
        MalformedRowError: That of ``read``, or a text in it has half of a surrogate pair.
    """
    result = read(value)
    try:
        for text in result if isinstance(result, tuple) else (result,):
            text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRowError(f"half of a surrogate pair in it: {error}") from error
    return result


def no_such_field(fields: dict[str, Any], setting: str, key: str) -> str:
    """The fields that there are, and the one that may have been meant."""
    close = difflib.get_close_matches(key, list(fields), n=1)
    hint = f"; did you mean {setting}={close[0]}?" if close else ""
    return f"its fields are {', '.join(map(str, fields)) or 'none'}{hint}"


def _field(fields: dict[str, Any], setting: str, key: str, read: Callable[[Any], Any]) -> Any:
    if key not in fields:
        raise MalformedRowError(
            f"there is no field {key!r} ({setting}); {no_such_field(fields, setting, key)}"
        )
    try:
        return read_value(fields[key], read)
    except MalformedRowError as error:
        raise MalformedRowError(f"field {key!r}: {error}") from error


def _response(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise MalformedRowError(f"a response is a text, this is {str(value)[:80]!r}")
    return value
