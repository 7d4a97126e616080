"""The think/answer layout that ``format``, ``tag_count`` and ``code_format`` look at.

    <think>
    reasoning
    </think>
    <answer>
    final answer
    </answer>

A chat template may already end with ``<think>``; the completion then starts inside it, and the
tag is put back before the layout is judged.
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
    """The completions, with the template's own ``<think>`` in front where it wrote one.

    Args:
        completions: As rewards get them.
        columns: The other columns; ``prompts`` (or ``prompt``) is looked at.
        think_prefilled: Whether the template ends with ``<think>``; ``None`` looks whether the
            prompt does.
    """
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
    """What stands between ``<answer>`` and ``</answer>`` if the whole text has the layout.

    One think block, then one answer block, and nothing after it but white space. The reasoning may
    mention the answer tags but no second ``<think>``; the answer may hold none of the four tags.

    Args:
        text: The whole completion, the template's ``<think>`` included.
        strict: Each tag stands on its own line, as Open-R1 asks; otherwise white space
            around tags is free.

    Returns:
        The body, or ``None`` when the layout is another.
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
    # "<answer>\n" is already eaten, so an empty answer is a bare line break.
    return body if not strict or body.endswith("\n") else None


_TAGS = ("<think>", "</think>", "<answer>")


def _on_own_lines(block: str) -> bool:
    """The block begins and ends with a line break, and not with one and the same."""
    return len(block) >= 2 and block[0] == "\n" and block[-1] == "\n"
