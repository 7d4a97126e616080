from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Collects wall-clock seconds by phase, from the start of a step to its end.

    ``with timer("generate"): ...`` counts towards ``timing/generate``. A phase within a phase
    stops the clock of the outer one, so that the phases and ``timing/other`` add up to
    ``timing/step``. For the thread that runs the loop; phases of other threads overlap.

    """

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        observe: Callable[[str, float | None], None] | None = None,
    ) -> None:
        """
        Args:
            on_phase: Called with the name of each phase that begins or resumes.
            observe: Called with the name of each phase when it begins, with ``None``, and when it
                ends, with its seconds, nested phases included.
        """
        self._on_phase, self._observe = on_phase, observe
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._changes, self._is_paused = 0, False
        self._step_start = self._since = time.perf_counter()

    @property
    def name(self) -> str:
        return self._open[-1] if self._open else "other"

    @property
    def changes(self) -> int:
        """How often a phase has begun or ended. During a pause it grows with each call, so that
        a pause never counts as a stall."""
        self._changes += self._is_paused
        return self._changes

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the seconds of this block, between two steps, out of the step."""
        began = time.perf_counter()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            gone = time.perf_counter() - began
            self._step_start += gone
            self._since += gone

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the seconds of this block towards ``phase``."""
        self._charge()
        self._open.append(phase)
        self._notify(phase)
        begun = self._since
        if self._observe is not None:
            self._observe(phase, None)
        try:
            yield
        finally:
            self._charge()
            if self._observe is not None:
                self._observe(phase, self._since - begun)
            self._open.pop()
            if self._open:
                self._notify(self._open[-1])

    def finish_step(self) -> dict[str, float]:
        """``timing/<phase>`` in seconds for each phase since the last call, and start over.

        ``timing/step`` is the whole, ``timing/other`` the time outside of phases. Raises
        RuntimeError: a phase is still open.
        """
        if self._open:
            raise RuntimeError(f"the step ends within the phase {self._open[-1]!r}")
        now = time.perf_counter()
        step = now - self._step_start
        seconds, self._seconds = self._seconds, {}
        self._step_start = self._since = now
        metrics = {f"timing/{phase}": value for phase, value in seconds.items()}
        metrics["timing/other"] = max(step - sum(seconds.values()), 0.0)
        metrics["timing/step"] = step
        return metrics

    def _charge(self) -> None:
        """Give the time since the last change of phase to the innermost open one."""
        self._changes += 1
        now = time.perf_counter()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def _notify(self, phase: str) -> None:
        if self._on_phase is not None:
            self._on_phase(phase)
