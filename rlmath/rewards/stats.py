"""Counts, and mean, standard deviation and share of ``None`` of each reward. Thread-safe."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


class Counts:
    """Counts by name since the last :meth:`drain`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def drain(self) -> Counter[str]:
        """Return the counts and reset them."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


@dataclass
class _Tally:
    values: list[float] = field(default_factory=list)
    nones: int = 0
    seconds: float | None = None
    errors: int = 0
    notes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[str] = field(default_factory=Counter)


class RewardStats:
    """Statistics since the last :meth:`drain`. Thread-safe.

    Independent of the order of threads to the last digit: sums are exact, or of sorted values.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = defaultdict(_Tally)

    def add_values(
        self, name: str, values: Iterable[float | None], seconds: float | None = None
    ) -> None:
        """Add the values of one call of the reward ``name``, and its wall time if known."""
        with self._lock:
            tally = self._tallies[name]
            if seconds is not None:
                tally.seconds = (tally.seconds or 0.0) + seconds
            for value in values:
                if value is None:
                    tally.nones += 1
                else:
                    tally.values.append(value)

    def add_statuses(self, name: str, statuses: Iterable[str]) -> None:
        with self._lock:
            self._tallies[name].statuses.update(statuses)

    def add_error(self, name: str) -> None:
        with self._lock:
            self._tallies[name].errors += 1

    def add_note(self, name: str, note: str, value: float) -> None:
        """Add a metric that the reward reports; its mean is logged."""
        with self._lock:
            self._tallies[name].notes[note].append(float(value))

    def drain(self) -> dict[str, float]:
        """Return all statistics and reset them.

        Returns:
            ``rewards/<name>/mean`` and ``/std`` (population; absent when nothing was scored),
            ``/none_share``, ``/seconds`` (sum over calls), ``/errors`` when there were any,
            ``/status/<status>`` (counts) for graded rewards, and the reward's own metrics.
        """
        with self._lock:
            tallies, self._tallies = self._tallies, defaultdict(_Tally)
        result: dict[str, float] = {}
        for name, tally in tallies.items():
            prefix = f"rewards/{name}"
            count = len(tally.values)
            seen = count + tally.nones
            if count:
                mean = math.fsum(tally.values) / count
                squares = math.fsum((value - mean) ** 2 for value in tally.values)
                result[f"{prefix}/mean"] = mean
                result[f"{prefix}/std"] = math.sqrt(squares / count)
            if seen:
                result[f"{prefix}/none_share"] = tally.nones / seen
            if tally.seconds is not None:
                result[f"{prefix}/seconds"] = tally.seconds
            if tally.errors:
                result[f"{prefix}/errors"] = float(tally.errors)
            for status, n in sorted(tally.statuses.items()):
                result[f"{prefix}/status/{status}"] = float(n)
            for note, noted in sorted(tally.notes.items()):
                result[f"{prefix}/{note}"] = sum(sorted(noted)) / len(noted)
        return result
