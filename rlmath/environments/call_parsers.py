"""Calls of tools in the text of a turn.

The two formats here are those of most open models. vLLM's parsers of them take a call that they
cannot read, such as JSON with a line's end in a text, for the answer, where the model is to read an
error here. For other formats ``rollout.tool_parser`` names one of vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rlmath.environments.base import ToolCall
from rlmath.errors import ConfigError

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Models write code with real line ends into JSON texts.
_DECODER = json.JSONDecoder(strict=False)


def hermes(text: str) -> Sequence[ToolCall] | None:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or a list of them in one block.
    Returns the calls; ``None``: there are none. Raises ValueError: a call cannot be read; the
    message is for the model."""
    calls: list[ToolCall] = []
    for block in _BLOCK.findall(text):
        found = _json(block)
        calls += [_call(one) for one in (found if isinstance(found, list) else [found])]
    return calls or None


def llama3_json(text: str) -> Sequence[ToolCall] | None:
    """``{"name": ..., "parameters": {...}}`` as the whole turn, several separated by semicolons.
    Returns the calls; ``None``: the turn is something else. Raises ValueError: a call cannot be
    read; the message is for the model."""
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    if not (rest.startswith("{") and '"name"' in rest):
        return None
    calls = []
    while rest:
        found, end = _json(rest, _DECODER.raw_decode)
        calls.append(_call(found))
        rest = rest[end:].strip().removeprefix(";").strip()
    return calls


def _json(text: str, read: Callable[[str], Any] = _DECODER.decode) -> Any:
    try:
        return read(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The call is not valid JSON: {error}.") from error


def _call(found: Any) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError('A call is a JSON object with "name" and "arguments".')
    arguments = found.get("arguments", found.get("parameters", {}))
    return ToolCall(found["name"], arguments_in(arguments))


def arguments_in(found: Any) -> dict[str, Any]:
    """The arguments of a call, by parameter name: as they are, or in JSON. Raises ValueError: they
    are no object; the message is for the model."""
    if isinstance(found, str):
        found = _json(found) if found.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("The arguments of a call are a JSON object.")
    return found


Parser: TypeAlias = Callable[[str], Sequence[ToolCall] | None]
PARSERS: dict[str, Parser] = {"hermes": hermes, "llama3_json": llama3_json}


def parser_of(template: str) -> str:
    """The name of the parser whose format a chat template shows. Raises ConfigError: none of
    them."""
    if "<tool_call>" in template:
        return "hermes"
    if '"parameters": ' in template and "ipython" in template:
        return "llama3_json"
    raise ConfigError(
        "the chat template shows no known format of calls; name it as rollout.tool_parser "
        "(hermes or llama3_json, for which the prompt describes the tools if the template lists "
        "none, or one of vLLM's), or use the fenced format"
    )
