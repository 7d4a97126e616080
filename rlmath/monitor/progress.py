"""Progress of a run for a person: one line per step, and in a terminal a live bar below it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlmath.monitor.sampling import SamplingProgress, TokenRate

_STEPS_IN_ESTIMATE = 10
# Outside a terminal, from one line about a long phase to the next.
REPORT_S = 60.0
_SAMPLING = ("generate", "evaluate")
_TOKENS_PER_S = "throughput/tokens_per_s"
_WORDS = {"log_probs": "log-probs of the actor", "weight_sync": "weight sync"}
_FIRST = "  (the first step also compiles; tokens/s and time left are without it)"


class ProgressDisplay:
    """Shows phase, step, reward, accuracy, tokens per second and time left.

    A line per step stays. In a terminal the phase and the time left are on a bar below the lines.
    In a notebook there is one line, which is replaced.

    A context manager; ``phase`` and ``step`` are called by the loop. What is printed meanwhile
    appears above the live display.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        live: bool | None = None,
        console: Console | None = None,
        line_every: int = 1,
        sampling: Callable[[], SamplingProgress | None] = lambda: None,
    ) -> None:
        """
        Args:
            first_step: The first that this process makes; more than 1 when a run continues.
            live: Whether there is a bar; ``None``: in a terminal.
            console: ``None``: standard output.
            line_every: A line every N steps, the first and the last.
            sampling: Progress of the engines; shown in the phases ``generate`` and ``evaluate``.
        """
        self._sampling, self._rate = sampling, TokenRate()
        self._phase_since = time.perf_counter()
        self._is_paused = False
        self._ended = threading.Event()
        self._reporter: threading.Thread | None = None
        self._line_every = line_every
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._total = total_steps
        self._first = first_step
        self._done = first_step - 1
        self._phase = "starting"
        self._announced: set[str] = set()
        self._first_announced = False
        self._started = time.perf_counter()
        # Ends of the last steps; the first entry is the start of the oldest of them.
        self._ends: deque[float] = deque([self._started], maxlen=_STEPS_IN_ESTIMATE + 1)
        self._line = NotebookLine() if self._console.is_jupyter and live is not False else None
        wanted = self._console.is_terminal if live is None else live and self._line is None
        self._live = (
            Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            if wanted
            else None
        )

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._live.start()
        else:
            self._reporter = threading.Thread(target=self._report, name="progress", daemon=True)
            self._reporter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ended.set()
        if self._reporter is not None:
            self._reporter.join()
        if self._live:
            self._phase = "done" if kind is None else "stopped"
            self._live.stop()

    def phase(self, name: str) -> None:
        """The loop enters this phase.

        Without a bar, each phase of the first step has a line when it begins: that step may take
        minutes.
        """
        self._phase, self._phase_since = name, time.perf_counter()
        if self._live or self._done >= self._first or name in self._announced:
            return
        self._announced.add(name)
        elapsed, words = time.perf_counter() - self._started, _WORDS.get(name, name)
        # An evaluation before the first step is no part of it.
        label = f"step {self._first}" if self._total and name != "evaluate" else "start"
        if label != "start" and not self._first_announced:
            self._first_announced, words = True, words + _FIRST
        self._print(f"{label:<8} {elapsed:5.1f} s  {words}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Say nothing during this block: the caller has the run."""
        began = time.perf_counter()
        self._is_paused = True
        try:
            yield
        finally:
            now = time.perf_counter()
            self._ends = deque((end + now - began for end in self._ends), self._ends.maxlen)
            self._is_paused, self._phase_since = False, now

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a finished step. ``metrics``: metrics of the step; missing ones are not shown."""
        self._done = step
        self._ends.append(time.perf_counter())
        own = self._ends[-1] - self._ends[-2]
        if step == self._first and self._total:
            # The first step compiles and warms up, so its speed says nothing of the next ones.
            metrics = {tag: one for tag, one in metrics.items() if tag != _TOKENS_PER_S}
            self._ends = deque(list(self._ends)[-1:], maxlen=_STEPS_IN_ESTIMATE + 1)
        if step % self._line_every and step not in (1, self._total):
            return
        seconds = metrics.get("timing/step", own)
        self._print(step_line(step, self._total, metrics, seconds, self.seconds_left()))

    def _report(self) -> None:
        """Outside a terminal: a line every minute of a phase that takes several."""
        while not self._ended.wait(REPORT_S):
            since_s = time.perf_counter() - self._phase_since
            if since_s >= REPORT_S and not self._is_paused:
                what = f"step {self._done + 1}/{self._total}  " if self._total else ""
                words = "  ".join(filter(None, (self._phase, self._sampling_words())))
                self._print(f"{what}{words}  for {duration(since_s)}")

    def _print(self, line: str) -> None:
        if self._line is not None:
            self._line.show(line)
        else:
            (self._live.console if self._live else self._console).print(Text(line))

    def _sampling_words(self) -> str:
        """How far the sampling is; empty in other phases."""
        found = self._sampling() if self._phase in _SAMPLING else None
        if found is None or not found.wanted:
            return ""
        return found.words(self._rate.update(found.tokens))

    def seconds_left(self) -> float:
        """Steps that remain, at the mean pace of the last ten; NaN before the end of the second."""
        steps = len(self._ends) - 1
        if not steps or self._done < self._first:
            return float("nan")
        return (self._ends[-1] - self._ends[0]) / steps * (self._total - self._done)

    def _render(self) -> Group:
        words = self._sampling_words()
        return Group(self._bar(), *([Text(words, no_wrap=True)] if words else []))

    def _bar(self) -> Table:
        elapsed = duration(time.perf_counter() - self._started)
        bar = Table.grid(padding=(0, 2))
        phase = Text(self._phase, style="cyan")
        if not self._total:
            bar.add_row(phase, Text(f"{elapsed} gone"))
            return bar
        bar.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=self._done, width=24),
            phase,
            Text(f"{elapsed} gone, {duration(self.seconds_left())} left"),
        )
        return bar


def step_line(
    step: int, total: int, metrics: Mapping[str, float], seconds: float, left: float
) -> str:
    """A finished step in one line. ``total``: number of the run's last step; 0: an evaluation,
    which has no steps."""
    parts = [f"step {step:>{len(str(total))}}/{total}"] if total else []
    if metrics.get("sampling/requested_groups") == 0 and "rollout/rewards" not in metrics:
        parts.append(f"{metrics['sampling/trained_groups']:.0f} groups sampled before")
    parts += [f"{name} {value}" for name, value in _readable(metrics).items()]
    parts += [f"{seconds:.1f} s"]
    if 0 < step < total and left == left:
        parts += [f"left {duration(left)}"]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """``12 s``, ``3:05``, ``2:03:05``; ``?`` for NaN."""
    if seconds != seconds:
        return "?"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _readable(metrics: Mapping[str, float]) -> dict[str, str]:
    formats = {
        "rollout/rewards": ("reward", "{:+.2f}"),
        "rollout/accuracy": ("accuracy", "{:.3f}"),
        "eval/accuracy": ("held-out", "{:.3f}"),
        "rollout/response_length": ("length", "{:.0f}"),
        "train/entropy_loss": ("entropy", "{:.3f}"),
        "sft/loss": ("loss", "{:.3f}"),
        _TOKENS_PER_S: ("tokens/s", "{:.0f}"),
    }
    return {
        name: template.format(metrics[tag])
        for tag, (name, template) in formats.items()
        if tag in metrics
    }


class NotebookLine:
    """A line in the cell that runs; the next cell that runs has its own."""

    def __init__(self) -> None:
        self._cell: int | None = None
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython import get_ipython
        from IPython.display import display

        content = {"text/plain": text}
        cell = get_ipython().execution_count
        if self._handle is None or cell != self._cell:
            self._cell, self._handle = cell, display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
