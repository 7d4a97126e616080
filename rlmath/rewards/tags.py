"""The think/answer layout that ``format``, ``tag_count`` and ``code_format`` check.

    <think>
    reasoning
    </think>
    <answer>
    final answer
    </answer>

If the chat template ends with ``<think>``, the completion starts inside it, and the tag is added
before the layout is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.rewards.base import prompt_text_of, texts_of

_MIDDLE = {True: re.compile(r"\n<answer>\n"), False: re.compile(r"\s*<answer>")}
_PREFILL = re.compile(r"<think>([ \t]*\n?)\s*\Z")


def full_texts(
    completions: Sequence[Any], columns: Mapping[str, Any], think_prefilled: bool | None
) -> list[str]:
    """The completions, with the template's ``<think>`` prepended if the prompt ends with it.
    ``think_prefilled``: whether the template ends with ``<think>``; ``None``: detect it from the
    prompt."""
    texts = texts_of(completions)
    if think_prefilled is not None:
        return ["<think>\n" + t for t in texts] if think_prefilled else texts
    prompts = columns.get("prompts", columns.get("prompt"))
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        prompts = [prompts] * len(texts)
    if len(prompts) != len(texts):
        return texts
    return [_prefill(p) + t for p, t in zip(prompts, texts, strict=True)]


def _prefill(prompt: Any) -> str:
    if prompt is None:
        return ""
    match = _PREFILL.search(prompt_text_of(prompt)[-64:])
    return "" if match is None else "<think>" + ("\n" if "\n" in match.group() else "")


def answer_body(text: str, *, strict: bool = True) -> str | None:
    """The text between ``<answer>`` and ``</answer>`` if the whole text has the layout.

    One think block, then one answer block, then only white space. The reasoning may contain the
    answer tags but no second ``<think>``; the answer may contain none of the four tags. Returns the
    body; ``None`` if the layout differs.

    Args:
        text: The whole completion, including the template's ``<think>``.
        strict: Each tag must be on its own line, as in Open-R1; otherwise white space around tags
            is free.
    """
    opening = "<think>\n" if strict else "<think>"
    if not text.startswith(opening):
        return None
    think, closed, rest = text[len("<think>") :].partition("</think>")
    if not closed or "<think>" in think or (strict and not _on_own_lines(think)):
        return None
    middle = _MIDDLE[strict].match(rest)
    if middle is None:
        return None
    body, closed, trailing = rest[middle.end() :].partition("</answer>")
    if not closed or trailing.strip() or any(t in body for t in _TAGS):
        return None
    # "<answer>\n" is already consumed, so an empty answer is a bare line break.
    return body if not strict or body.endswith("\n") else None


_TAGS = ("<think>", "</think>", "<answer>")


def _on_own_lines(block: str) -> bool:
    """Whether the block begins and ends with two different line breaks."""
    return len(block) >= 2 and block[0] == "\n" and block[-1] == "\n"
