"""Prompts shown to the user: one rendered prompt, and signs that it is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlmath.config.schema import DataConfig
from rlmath.data.fields import field_of
from rlmath.data.markers import MARKERS, asks_for_box, prompt_texts
from rlmath.data.prompts import Encoder, EnvironmentTokenizer
from rlmath.data.rows import Draft
from rlmath.model.chat import is_instruct

if TYPE_CHECKING:
    from rlmath.data.prompts import Tokenizer

_END_CHARS = 200
_SPECIAL = re.compile(r"<[^<> ]+>|\[[A-Z]+\]")


def shown_prompt(prompt: str) -> str:
    """A prompt on one line, escaped: the first and the last 200 characters if it is long."""
    if len(prompt) <= 2 * _END_CHARS:
        return repr(prompt)
    left_out = len(prompt) - 2 * _END_CHARS
    first, last = prompt[:_END_CHARS], prompt[-_END_CHARS:]
    return f"{first!r} ... {left_out:,} characters ... {last!r}"


def prompt_warnings(
    drafts: Sequence[Draft], data: DataConfig, tokenizer: Tokenizer, *, needs_box: bool
) -> Iterator[str]:
    """Warnings about prompts unlike those that the model was trained on."""
    raw = [prompt_texts(field_of(draft.fields, data.prompt_key)) for draft in drafts]
    found = [match[0] for texts in raw for text in texts if (match := MARKERS.search(text))]
    of = f"of {len(drafts):,} prompts"
    if data.apply_chat_template and found:
        yield (
            f"a chat template is applied twice: {len(found):,} {of} have chat markers ({found[0]}) "
            "before data.apply_chat_template adds its own; set it to false"
        )
    untold = isinstance(tokenizer, EnvironmentTokenizer) and [
        name for name in tokenizer.tool_names if name not in drafts[0].prompt
    ]
    if untold:
        yield (
            f"the chat template does not list the tools: describe {', '.join(untold)} in "
            "data.system_prompt, with the form of a call"
        )
    unused = not data.apply_chat_template and bool(tokenizer.chat_template) and not found
    if unused and is_instruct(str(tokenizer.name_or_path)):
        yield (
            "the model's chat template is not applied, and it has learned to answer after it; "
            "set data.apply_chat_template=true"
        )
    unknown = _unknown_marker(found[:1], tokenizer)
    if unknown:
        yield (
            f"prompts have the chat marker {unknown}, which is no token of this model: they are "
            "rendered for another one; use the problems without markers"
        )
    first = Encoder(tokenizer).encode([drafts[0].prompt], not data.apply_chat_template)[0]
    begin = tokenizer.decode([first[0]]) if len(first) > 1 and first[0] == first[1] else ""
    if _SPECIAL.fullmatch(begin):
        yield f"prompts begin with {begin} twice: take it out of the data or the chat template"
    silent = sum(not asks_for_box(draft.prompt) for draft in drafts) if needs_box else 0
    if silent:
        where = "before the last marker" if found else "in data.prompt_template, or leave it null"
        yield (
            f"{silent:,} {of} do not ask for \\boxed{{}}, and with reward.fallback=none only a "
            f"boxed answer can be correct; write the request {where}"
        )


def too_few(what: str, count: int, setting: str, per_step: int) -> list[str]:
    """A warning if a step has more prompts than there are different ones."""
    if count >= per_step:
        return []
    least, rest = divmod(per_step, count)
    times = f"{least} or {least + 1} times" if rest else f"{least} times"
    return [
        f"warning  {count:,} {what} for {setting}={per_step:,}: each is in a step {times}, as if "
        f"it were as many different ones; use more {what}, or {setting}={count} or less"
    ]


def _unknown_marker(markers: Sequence[str], tokenizer: Tokenizer) -> str:
    """The first marker that the tokenizer cuts into pieces; empty if there is none."""
    for marker in markers:
        ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
        if len(ids) > 1 and marker.startswith("<"):
            return marker
    return ""
