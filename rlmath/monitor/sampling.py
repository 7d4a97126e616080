"""How far the engines are with a round of sampling, for the terminal and for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

_RATE_S = 10.0


@dataclass(frozen=True)
class SamplingProgress:
    """A round of sampling: a step's, or a benchmark's."""

    done: int
    wanted: int  # Samples asked for so far; a filter may ask for more.
    tokens: int  # Response tokens of all engines since they started.
    unfinished: tuple[int, ...]  # Samples of each engine that are not finished.

    def words(self, tokens_per_s: float | None) -> str:
        parts = [f"{self.done:,}/{self.wanted:,} samples"]
        if tokens_per_s is not None:
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        left = sum(self.unfinished)
        if len(self.unfinished) > 1 and 0 < left < self.wanted / 4:
            most = max(self.unfinished)
            parts.append(f"engine {self.unfinished.index(most)} has {most} of the last {left}")
        return ", ".join(parts)


class TokenRate:
    """Tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, tokens: int, now_s: float | None = None) -> float | None:
        """Update with the tokens so far; ``None`` in the first second and after an engine's
        restart."""
        now_s = time.monotonic() if now_s is None else now_s
        if self._seen and tokens < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _RATE_S:
            self._seen.popleft()
        began_s, first = self._seen[0]
        return (tokens - first) / (now_s - began_s) if now_s - began_s >= 1.0 else None
