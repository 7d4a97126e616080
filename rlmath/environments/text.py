"""Outputs of tools as text that a model reads."""

from __future__ import annotations

import codecs


def cut_bytes(output: bytes, limit: int) -> str:
    """The output as text; of a longer one than ``limit`` bytes the middle is left out."""
    if len(output) <= limit:
        return join_ends(output, b"", len(output))
    half = limit // 2
    return join_ends(output[:half], output[-half:], len(output))


def join_ends(head: bytes, tail: bytes, total: int) -> str:
    """The first and the last bytes of ``total`` as text; invalid UTF-8 is replaced."""
    missing = total - len(head) - len(tail)
    if missing <= 0:
        return (head + tail).decode("utf-8", "replace")
    # Characters that were cut in two are dropped.
    first = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    begin = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
    last = tail[begin:].decode("utf-8", "replace")
    return f"{first}\n[... {missing} bytes left out ...]\n{last}"
