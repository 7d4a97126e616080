"""Where a run stands, for a person: a live display in a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_STEPS_IN_ESTIMATE = 10


class ProgressDisplay:
    """Shows phase, step, reward, accuracy, tokens per second and time left.

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
    ) -> None:
        """
        Args:
            total_steps: Number of the run's last step.
            first_step: The first that this process makes; more than 1 when a run continues.
            live: A display that is redrawn, or a line per step; ``None``: the first in a terminal.
            console: Where to; ``None``: standard output.
            line_every: Outside a terminal, a line every N steps, the first and the last.
        """
        self._line_every = line_every
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._total = total_steps
        self._done = first_step - 1
        self._phase = "starting"
        self._shown: dict[str, str] = {}
        self._started = time.perf_counter()
        # Ends of the last steps; the first entry is the start of the oldest of them.
        self._ends: deque[float] = deque([self._started], maxlen=_STEPS_IN_ESTIMATE + 1)
        wanted = self._console.is_terminal if live is None else live
        self._live = (
            Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            if wanted
            else None
        )

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._phase = "done" if kind is None else "stopped"
            self._live.stop()

    def phase(self, name: str) -> None:
        """The loop enters this phase."""
        self._phase = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over.

        Args:
            step: Its number.
            metrics: Those of the step; what is not there is not shown. A held-out accuracy stays
                in view until the next one.
        """
        self._done = step
        self._ends.append(time.perf_counter())
        shown = _readable(metrics)
        if self._live:
            held_out = {key: self._shown[key] for key in ("held-out",) if key in self._shown}
            self._shown = {**held_out, **shown}
            return
        if step % self._line_every and step not in (1, self._total):
            return
        seconds = metrics.get("timing/step", self._ends[-1] - self._ends[-2])
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        parts += [f"{name} {value}" for name, value in shown.items()]
        parts += [f"{seconds:.1f} s", f"left {duration(self.seconds_left())}"]
        self._console.print(Text("  ".join(parts)))

    def seconds_left(self) -> float:
        """Steps that remain, at the mean pace of the last ten; NaN before the first is over."""
        steps = len(self._ends) - 1
        if not steps:
            return float("nan")
        return (self._ends[-1] - self._ends[0]) / steps * (self._total - self._done)

    def _render(self) -> Group:
        elapsed = time.perf_counter() - self._started
        first = Table.grid(padding=(0, 2))
        first.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=24),
            Text(self._phase, style="cyan"),
            Text(f"{duration(elapsed)} gone, {duration(self.seconds_left())} left"),
        )
        second = Text("  ".join(f"{name} {value}" for name, value in self._shown.items()))
        return Group(first, second)


def duration(seconds: float) -> str:
    """``12s``, ``3:05``, ``2:03:05``; ``?`` for NaN."""
    if seconds != seconds:
        return "?"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


def _readable(metrics: Mapping[str, float]) -> dict[str, str]:
    formats = {
        "rollout/rewards": ("reward", "{:+.2f}"),
        "rollout/accuracy": ("accuracy", "{:.3f}"),
        "eval/accuracy": ("held-out", "{:.3f}"),
        "rollout/response_length": ("length", "{:.0f}"),
        "train/entropy_loss": ("entropy", "{:.3f}"),
        "sft/loss": ("loss", "{:.3f}"),
        "throughput/tokens_per_s": ("tokens/s", "{:.0f}"),
    }
    return {
        name: template.format(metrics[tag])
        for tag, (name, template) in formats.items()
        if tag in metrics
    }
