"""Calls as fenced blocks of plain text, which a base model can write without a template.

    ```python
    print(2**10)
    ```
    ```output
    1024
    ```

A block calls the tool that its fence names. It has the tool's arguments as a JSON object, or as it
is the text for a tool whose one parameter is a text. The first such block of a turn ends it at its
closing fence, as soon as the token with that is sampled. What follows is appended as tokens: the
fence of an ``output`` block, the output, and its closing fence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.environments.base import Suffix, ToolCall, ToolResult, TurnFormat
from rlmath.environments.call_parsers import arguments_in
from rlmath.environments.text import cut_tokens

OPENING, CLOSING = "```", "\n```"


class Fenced(TurnFormat):
    """The format of fenced blocks. Nothing that a tool returns becomes a special token. ``tools``:
    their schemas. ``max_observation_tokens``: longest output of a turn; the middle of a longer one
    is left out."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], max_observation_tokens: int
    ) -> None:
        self._tokenizer, self._most = tokenizer, max_observation_tokens
        functions = [tool["function"] for tool in tools]
        # By name of the tool: the parameter that a block's text is.
        self._texts = {str(one["name"]): _one_text(one["parameters"]) for one in functions}
        self.stop = tuple((OPENING + name, CLOSING) for name in self._texts)

    def calls(self, text: str) -> Sequence[ToolCall] | None:
        found = ((text.find(OPENING + name), name) for name in self._texts)
        # If several tools begin at one place, the one with the longest name.
        start, name = min(
            ((at, name) for at, name in found if at >= 0),
            key=lambda one: (one[0], -len(one[1])),
            default=(-1, ""),
        )
        first = start + len(OPENING) + len(name)
        end = -1 if start < 0 else text.find(CLOSING, first)
        if end < 0:
            return None
        # The rest of the first line belongs to the fence.
        _, _, body = text[first:end].partition("\n")
        parameter = self._texts[name]
        return [ToolCall(name, arguments_in(body) if parameter is None else {parameter: body})]

    def suffix(self, turn_text: str, results: Sequence[ToolResult]) -> Suffix:
        text = "\n".join(result.text.rstrip("\n") for result in results)
        return self._after_turn(turn_text, "```output\n", text, "\n```\n")

    def reply(self, turn_text: str, text: str) -> Suffix:
        return self._after_turn(turn_text, "", text.rstrip("\n"), "\n")

    def _after_turn(self, turn_text: str, opening: str, text: str, closing: str) -> Suffix:
        before = self._encode(("" if turn_text.endswith("\n") else "\n") + opening)
        shown = [*before, *self._encode(cut_tokens(text, self._most, self._encode))]
        return Suffix((*shown, *self._encode(closing)), (len(before), len(shown)))

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])


def _one_text(parameters: Mapping[str, Any]) -> str | None:
    """The name of the parameter of a tool that has one, a text."""
    known = parameters["properties"]
    texts = [name for name, one in known.items() if one.get("type") == "string"]
    return texts[0] if len(texts) == len(known) == 1 else None
