"""Reading of rows: the prompt as text, and the answers or the response.

The loader and ``--check`` both read rows here, so that they accept the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlmath.config.schema import DataConfig, MalformedRow
from rlmath.data.answers import accepted_answers
from rlmath.data.control import restore_commands
from rlmath.data.fields import field_of, has_field, no_such_field, refuse_images
from rlmath.data.files import MalformedRowError, Row
from rlmath.data.prompts import PromptRenderer
from rlmath.errors import UserError
from rlmath.types import Problem


@dataclass(frozen=True)
class Target:
    """The field read besides the prompt."""

    setting: str
    key: str
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Draft:
    """A readable row before tokenization; ``target`` is its answers or its response.

    ``is_restored`` says that LaTeX commands in it were restored (:mod:`rlmath.data.control`).
    """

    place: str
    prompt: str
    target: Any
    fields: dict[str, Any]
    is_restored: bool = False


def answers_in(key: str, setting: str = "data.answer_key") -> Target:
    """Accepted answers, see :func:`rlmath.data.answers.accepted_answers`."""
    return Target(setting, key, accepted_answers)


def responses_in(key: str) -> Target:
    return Target("sft.response_key", key, _response)


def usable_rows(
    rows: Iterable[Row], settings: DataConfig, renderer: PromptRenderer, target: Target
) -> tuple[list[Draft], list[str]]:
    """The readable rows, and why each of the others was skipped. Raises UserError: a malformed row,
    unless ``malformed_rows`` is ``skip``."""
    drafts: list[Draft] = []
    skipped: list[str] = []
    for row in rows:
        try:
            if isinstance(row.fields, MalformedRowError):
                raise row.fields
            refuse_images(row.fields)
            render = functools.partial(renderer.render, row=row.fields)
            prompt = _field(row.fields, "data.prompt_key", settings.prompt_key, render)
            value = _field(row.fields, target.setting, target.key, target.read)
        except MalformedRowError as error:
            message = f"{row.place}: {error}"
            if settings.malformed_rows is MalformedRow.stop:
                raise UserError(
                    f"{message.removesuffix('?')}. Fix the row, or leave such rows out with "
                    "data.malformed_rows=skip"
                ) from error
            skipped.append(message)
            continue
        keys = (settings.prompt_key, target.key)
        texts = [field_of(row.fields, key) for key in keys]
        drafts.append(Draft(row.place, prompt, value, row.fields, restore_commands(texts) != texts))
    return drafts, skipped


def problem_of(
    draft: Draft, token_ids: tuple[int, ...], settings: DataConfig, renderer: PromptRenderer
) -> Problem:
    messages = None
    if settings.apply_chat_template:
        value = restore_commands(field_of(draft.fields, settings.prompt_key))
        messages = tuple(renderer.messages(value, draft.fields))
    return Problem(draft.place, draft.prompt, token_ids, draft.target, draft.fields, messages)


def read_value(value: Any, read: Callable[[Any], Any]) -> Any:
    """The result of ``read`` for a field's value with LaTeX commands restored. Raises
    MalformedRowError: from ``read``, or because a text has half of a surrogate pair."""
    result = read(restore_commands(value))
    try:
        for text in result if isinstance(result, tuple) else (result,):
            text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRowError(f"half of a surrogate pair in it: {error}") from error
    return result


def _field(fields: dict[str, Any], setting: str, key: str, read: Callable[[Any], Any]) -> Any:
    if not has_field(fields, key):
        raise MalformedRowError(
            f"there is no field {key!r} ({setting}); {no_such_field(fields, setting, key)}"
        )
    value = field_of(fields, key)
    try:
        return read_value(value, read)
    except MalformedRowError as error:
        inner = ", ".join(f"{key}.{name}" for name in value) if isinstance(value, dict) else ""
        hint = f"; use one of its fields: {setting}={inner}" * bool(inner)
        raise MalformedRowError(f"field {key!r}: {error}{hint}") from error


def _response(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise MalformedRowError(f"a response is a text, this is {str(value)[:80]!r}")
    return value
