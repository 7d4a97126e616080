"""The metrics of each step, to ``metrics.jsonl`` and to the trackers."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.monitor.digests import DIGESTS_FILE
from rlmath.monitor.files import replacing, to_json
from rlmath.monitor.samples import FOLDER as SAMPLES_FOLDER
from rlmath.monitor.samples import drop_samples_after
from rlmath.monitor.trackers import TrackedRun, Trackers
from rlmath.monitor.trackers.tensorboard import TENSORBOARD_FOLDER

DECISIONS_FILE = "decisions.jsonl"
METRICS_FILE = "metrics.jsonl"
# Keys of a line of metrics.jsonl that are no metrics.
STEP, TIME, NOT_FINITE = "step", "time_s", "not_finite"


class MetricsWriter:
    """Writes ``<run_dir>/metrics.jsonl``, and tells the trackers.

    A line of ``metrics.jsonl`` is one step: ``{"step": 12, "time_s": <Unix time>, "<tag>": number,
    ...}``. A value that is NaN or infinite is ``null`` there, and ``"not_finite": {"<tag>":
    "nan"}`` says which it was. What is written has left the process before a call returns.
    """

    def __init__(
        self,
        run_dir: str | Path,
        last_step: int | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        name: str | None = None,
        project: str = "rlmath",
        warn: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            last_step: The step of the checkpoint that the run continues from: what an interrupted
                run wrote of later steps is dropped. ``None``: the run starts over, and what an
                earlier one wrote here is moved to ``set_aside_<n>/``.
            name: Name of the run in trackers; ``None``: its folder's.
            warn: Called with a message when a tracker fails, from any thread.
        """
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._last_step = -1 if last_step is None else last_step
        path = self._run_dir / METRICS_FILE
        if last_step is None:
            set_aside(self._run_dir)
        kept = [line for line in _lines(path) if line[STEP] <= self._last_step]
        with replacing(path) as file:
            file.writelines(f"{to_json(line)}\n".encode() for line in kept)
        drop_samples_after(self._run_dir, self._last_step)
        self._file = path.open("a", encoding="utf-8")
        run = TrackedRun(self._run_dir, name or self._run_dir.resolve().name, project, last_step)
        self._trackers = Trackers(trackers, run, warn)

    def write_settings(
        self, text: str, values: Mapping[str, Any], metrics: Sequence[str] = ()
    ) -> None:
        """Show the settings in the trackers."""
        self._trackers.settings(text, values, metrics)

    def write(
        self, step: int, metrics: Mapping[str, float], texts: Mapping[str, str] | None = None
    ) -> None:
        """Write one step; each step once, in rising order. ``texts``: tag to text, such as sampled
        responses. TensorBoard shows them exactly as they are, markup in them included. Raises
        ValueError: a step that is not after the last one; TypeError: a value that is no number."""
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step} was written")
        values = {tag: _number(tag, value) for tag, value in metrics.items()}
        now = time.time()
        line: dict[str, Any] = {STEP: step, TIME: round(now, 3), **values}
        odd = {tag: str(value) for tag, value in values.items() if not math.isfinite(value)}
        if odd:
            line[NOT_FINITE] = odd
        self._file.write(f"{to_json(line)}\n")
        self._file.flush()
        self._trackers.step(step, now, values, texts or {})
        self._last_step = step

    def close(self) -> None:
        self._file.close()
        self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``.

    A last line that was cut off is left out, and so is a damaged one before it, with a warning.
    """
    return list(_lines(Path(run_dir) / METRICS_FILE))


def _number(tag: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {tag!r} is no number but {value!r}") from error


def set_aside(run_dir: Path, *more: str) -> None:
    """Move the files of an earlier run that finished a step to a separate folder."""
    if not any(True for _ in _lines(run_dir / METRICS_FILE)):
        # Digests of an unfinished step.
        (run_dir / DIGESTS_FILE).unlink(missing_ok=True)
        return
    number = 1
    while (aside := run_dir / f"set_aside_{number}").exists():
        number += 1
    aside.mkdir()
    moved = (TENSORBOARD_FOLDER, SAMPLES_FOLDER, DIGESTS_FILE, DECISIONS_FILE)
    # The metrics last: if the process is ended before, the next one moves the rest.
    for name in (*moved, *more, METRICS_FILE):
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    print(f"metrics and samples of an earlier run are in {aside} now", flush=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    damaged = 0
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if damaged:
                print(
                    f"warning: {path}, line {damaged}: damaged, and left out",
                    file=sys.stderr,
                    flush=True,
                )
                damaged = 0
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict) and isinstance(line.get(STEP), int):
                yield line
            else:  # The last one may be, of a process that was ended while it wrote it.
                damaged = number
