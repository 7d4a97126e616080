"""Format numbers of bytes."""

from __future__ import annotations


def in_words(num_bytes: float) -> str:
    """``2.5 MiB`` or ``1.2 GiB``; GiB from a tenth of it on."""
    if abs(num_bytes) < 2**30 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
