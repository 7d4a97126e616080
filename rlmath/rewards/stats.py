"""Mean, spread and share of ``None`` of each reward, gathered from many threads."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class _Tally:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean
    nones: int = 0
    seconds: float | None = None
    errors: int = 0
    notes: dict[str, tuple[float, int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, value: float | None) -> None:
        if value is None:
            self.nones += 1
            return
        # Welford's update: no loss of digits when the mean is large against the spread.
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)


class RewardStats:
    """Figures since the last :meth:`drain`. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = defaultdict(_Tally)

    def add_values(
        self, name: str, values: Iterable[float | None], seconds: float | None = None
    ) -> None:
        """Values of one call of the reward ``name``, and the wall time that it took if known."""
        with self._lock:
            tally = self._tallies[name]
            if seconds is not None:
                tally.seconds = (tally.seconds or 0.0) + seconds
            for value in values:
                tally.add(value)

    def add_statuses(self, name: str, statuses: Iterable[str]) -> None:
        """Grader statuses behind the reward ``name``."""
        with self._lock:
            self._tallies[name].statuses.update(statuses)

    def add_error(self, name: str) -> None:
        """A call of the reward ``name`` that raised."""
        with self._lock:
            self._tallies[name].errors += 1

    def add_note(self, name: str, note: str, value: float) -> None:
        """A figure that the reward itself reports; the mean is kept."""
        with self._lock:
            notes = self._tallies[name].notes
            total, count = notes.get(note, (0.0, 0))
            notes[note] = (total + float(value), count + 1)

    def drain(self) -> dict[str, float]:
        """All figures, and start anew.

        Returns:
            ``rewards/<name>/mean`` and ``/std`` (population; absent when nothing was scored),
            ``/none_share``, ``/seconds`` (sum over calls), ``/errors`` when there were any,
            ``/status/<status>`` (counts) where a grader looked, and what the reward noted.
        """
        with self._lock:
            tallies, self._tallies = self._tallies, defaultdict(_Tally)
        result: dict[str, float] = {}
        for name, tally in tallies.items():
            prefix = f"rewards/{name}"
            seen = tally.count + tally.nones
            if tally.count:
                result[f"{prefix}/mean"] = tally.mean
                result[f"{prefix}/std"] = math.sqrt(tally.squares / tally.count)
            if seen:
                result[f"{prefix}/none_share"] = tally.nones / seen
            if tally.seconds is not None:
                result[f"{prefix}/seconds"] = tally.seconds
            if tally.errors:
                result[f"{prefix}/errors"] = float(tally.errors)
            for status, n in sorted(tally.statuses.items()):
                result[f"{prefix}/status/{status}"] = float(n)
            for note, (total, n) in sorted(tally.notes.items()):
                result[f"{prefix}/{note}"] = total / n
        return result
