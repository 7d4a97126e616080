"""Outputs of tools as text that a model reads."""

from __future__ import annotations

import codecs
from collections.abc import Callable

_NOTE = "\n[... the middle of the output was left out ...]\n"


def cut_bytes(output: bytes, limit: int) -> str:
    """The output as text, with invalid UTF-8 replaced; of a longer one than ``limit`` bytes the
    middle is left out."""
    if len(output) <= limit:
        return output.decode("utf-8", "replace")
    half = limit // 2
    # Characters that were cut in two are dropped.
    first = codecs.getincrementaldecoder("utf-8")("replace").decode(output[:half])
    tail = output[len(output) - half :]
    begin = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
    last = tail[begin:].decode("utf-8", "replace")
    return f"{first}\n[... {len(output) - 2 * half} bytes left out ...]\n{last}"


def cut_tokens(text: str, most: int, encode: Callable[[str], list[int]]) -> str:
    """A text of at most ``most`` tokens; the middle of a longer one is left out."""
    kept, shown = len(text), text
    while (length := len(encode(shown))) > most and kept > 0:
        kept = min(kept - 1, int(kept * most / length))
        half = kept // 2
        shown = f"{text[: kept - half]}{_NOTE}{text[len(text) - half :]}"
    return shown
