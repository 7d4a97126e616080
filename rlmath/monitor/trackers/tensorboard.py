"""TensorBoard: files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, TrackerTraits

TENSORBOARD_FOLDER = "tensorboard"


@TRACKERS.register("tensorboard", traits=TrackerTraits(inline=True))
class TensorBoard:
    """Writes ``<run_dir>/tensorboard/``. What is written has left the process before a call
    returns."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._first = -1 if run.last_step is None else run.last_step
        # TensorBoard hides events from purge_step on that were written before this writer's.
        self._writer = SummaryWriter(
            str(run.folder / TENSORBOARD_FOLDER),
            purge_step=None if run.last_step is None else run.last_step + 1,
        )

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        """All as text, single values as hparams."""
        from torch.utils.tensorboard.summary import hparams

        self._writer.add_text("settings", as_markdown_code(text), self._first + 1)
        plain = {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}
        # Not add_hparams, which writes to a separate folder, apart from the run's curves.
        experiment, begin, _ = hparams(plain, dict.fromkeys(compared_by, 0.0))
        for summary in (experiment, begin):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=time_s)
        for tag, text in texts.items():
            self._writer.add_text(tag, as_markdown_code(text), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def as_markdown_code(text: str) -> str:
    """Markdown that shows ``text`` as it is: an indented block, in which no markup is read."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
