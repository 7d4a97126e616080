"""One object of the loops for metrics, samples, phases and the display."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from rlmath.config.schema import RunnerConfig
from rlmath.errors import printable
from rlmath.monitor.digests import DigestLog, StepDigests, digest_samples
from rlmath.monitor.files import to_json
from rlmath.monitor.json_lines import LinesProcess
from rlmath.monitor.phase_observers import PhaseObservers
from rlmath.monitor.progress import ProgressDisplay
from rlmath.monitor.prometheus import MetricsServer
from rlmath.monitor.samples import limit_samples, sample_as_text, write_engines, write_samples
from rlmath.monitor.sampling import SamplingProgress
from rlmath.monitor.timing import PhaseTimer
from rlmath.monitor.writer import DECISIONS_FILE, MetricsWriter
from rlmath.types import Group

WARNINGS_FILE = "warnings.jsonl"
# Steps between two measurements of the size of their files.
_LOOK_AT_SIZES_EVERY = 100


@dataclass(frozen=True)
class Listeners:
    """The other receivers of its lines."""

    phase: Callable[[], object] = lambda: None
    warning: Callable[[str], object] = lambda _: None


class Monitor:
    """Shows and records a run. Made by :func:`open_monitor`."""

    def __init__(
        self,
        run_dir: Path,
        writer: MetricsWriter,
        display: ProgressDisplay,
        runner: RunnerConfig,
        step: int,
        digests: DigestLog,
        server: MetricsServer | None = None,
        listeners: Listeners = Listeners(),
    ) -> None:
        self._server, self._listeners = server, listeners
        self.run_dir = run_dir
        self._digests = digests
        self._digesting: Future[StepDigests] | None = None
        self._step = step  # The one that is being made.
        self._writer, self._display, self._runner = writer, display, runner
        self.phase = PhaseTimer(on_phase=self._phase_begins, observe=self._observe_phase)
        self._texts: dict[str, str] = {}
        self._tokens = 0
        self._choices: dict[str, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._lines = LinesProcess()
        self._observers = PhaseObservers(run_dir, self.warn)

    def _observe_phase(self, name: str, seconds: float | None) -> None:
        if seconds is None:
            self._observers.begin(name, self._step)
        else:
            self._observers.end(name, self._step, seconds)

    def _phase_begins(self, name: str) -> None:
        self._display.phase(name)
        if self._server is not None:
            self._server.phase(name)
        self._listeners.phase()

    def show_settings(self, text: str, values: Mapping[str, object]) -> None:
        """The run's settings, in TensorBoard; see :meth:`MetricsWriter.write_settings`."""
        self._digests.settings(values)
        compared_by = ("eval/accuracy", "rollout/rewards", "rollout/accuracy")
        self._writer.write_settings(text, values, compared_by)

    def count_tokens(self, tokens: int) -> None:
        """Tokens of this step, prompts and responses, for ``throughput/tokens_per_s``."""
        self._tokens += tokens

    def log_samples(
        self,
        step: int,
        groups: Sequence[Group],
        kind: str = "step",
        dropped: Mapping[str, str] | None = None,
        engines: Mapping[str, object] | None = None,
    ) -> None:
        """Every sample to ``samples/``, and a few to TensorBoard with the step's metrics.

        The file is written while the ranks compute; it is complete when ``log_step`` returns.

        Args:
            kind: ``step`` for training's samples, ``eval`` or ``eval_<benchmark>`` for
                evaluation's, which are all kept.
            engines: Work of each engine for them, for ``samples/step_000012.engines.json``.
        """
        if kind == "step":
            # While the ranks compute: of hundred million tokens it takes a second.
            self._digesting = self._thread.submit(digest_samples, groups)
        self.finish_samples()
        self._writing = self._thread.submit(
            self._write_samples, step, groups, kind, dropped, engines
        )
        tags = "rollout" if kind == "step" else kind.replace("_", "/", 1)
        for index, group in enumerate(groups[: self._runner.tensorboard_samples]):
            text = sample_as_text(group.problem, group.samples[0])
            self._texts[f"{tags}/sample_{index}"] = text

    def _write_samples(
        self,
        step: int,
        groups: Sequence[Group],
        kind: str,
        dropped: Mapping[str, str] | None,
        engines: Mapping[str, object] | None,
    ) -> None:
        count = self._runner.token_samples if kind == "step" else 0
        write_samples(
            self.run_dir,
            step,
            groups,
            kind=kind,
            dropped=dropped,
            token_samples=count,
            process=self._lines,
        )
        if engines is not None:
            write_engines(self.run_dir, step, engines)
        if self._runner.samples_keep_gib is not None:
            limit_samples(self.run_dir, self._runner.samples_keep_gib)

    def finish_samples(self) -> None:
        """Wait for the file that is being written. A run is worth more than this file: what a
        disk says is told, and the run continues."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._warn_if_not_written(writing.result)

    @property
    def digests(self) -> StepDigests:
        """Digests of the present step, for ``rlmath bisect``; what was sampled is there when
        ``log_step`` returns."""
        return self._digests.now

    @property
    def digest_log(self) -> DigestLog:
        return self._digests

    def _write_digests(self, step: int) -> None:
        digesting, self._digesting = self._digesting, None
        if digesting is not None:
            self._digests.now.add_first(digesting.result())
        self._warn_if_not_written(lambda: self._digests.write(step))

    def _warn_if_not_written(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.warn(f"not written: {error}")

    def close(self) -> None:
        """Finish writing, then end the thread and its process."""
        self._observers.close()
        self._thread.shutdown(wait=True)
        self._lines.close()

    def log_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """End a step: its metrics with the timings since the last one, shown and written."""
        self.finish_samples()
        timings = self.phase.finish_step()
        everything = {**metrics, **timings}
        if self._tokens:
            everything["throughput/tokens_per_s"] = self._tokens / timings["timing/step"]
        self._write_digests(step)
        keep_gib = self._runner.samples_keep_gib
        if keep_gib is not None and step % _LOOK_AT_SIZES_EVERY == 0:
            self._warn_if_not_written(lambda: limit_samples(self.run_dir, keep_gib))
        self._writer.write(step, everything, self._texts)
        self._display.step(step, everything)
        if self._server is not None:
            self._server.step(step, everything)
        self._step = step + 1
        self._texts, self._tokens = {}, 0
        return everything

    def begin_step(self) -> None:
        """Forget the time that has passed outside of steps (starting, exporting)."""
        self.phase.finish_step()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Between two steps the caller has the run: no phase and no step is timed."""
        with self.phase.pause(), self._display.pause():
            yield

    def note(self, step: int, what: str, choice: str, reason: str) -> None:
        """An automatic decision of the run: to ``decisions.jsonl`` each time, and to the
        terminal when it is another choice than the last one. (A step that is done again after a
        resume has its line again.)"""
        line = {"step": step, "what": what, "choice": choice, "reason": reason}
        self._warn_if_not_written(lambda: _append(self.run_dir / DECISIONS_FILE, line))
        if self._choices.get(what) != choice:
            self._choices[what] = choice
            print(f"step {step}: {what} takes {choice}: {reason}", flush=True)

    def warn(self, message: str) -> None:
        """A line on standard error, below which the live display stays, and in
        ``warnings.jsonl``."""
        line = {"step": self._step, "time_s": round(time.time(), 3), "message": message}
        # On a full disk the terminal has it alone.
        with contextlib.suppress(OSError):
            _append(self.run_dir / WARNINGS_FILE, line)
        if self._server is not None:
            self._server.warning()
        self._listeners.warning(message)
        print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def _append(path: Path, line: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{to_json(line)}\n")


@contextlib.contextmanager
def open_monitor(
    run_dir: str | Path,
    runner: RunnerConfig,
    total_steps: int,
    last_step: int | None = None,
    line_every: int = 1,
    sampling: Callable[[], SamplingProgress | None] = lambda: None,
    listeners: Listeners = Listeners(),
) -> Iterator[Monitor]:
    """A monitor for the length of a run.

    Args:
        last_step: The step that the run continues from; ``None``: it starts over.
        line_every: Outside a terminal, a line every N steps.
        sampling: How far the sampling is; ``None``: nothing is sampled.
    """
    folder = Path(run_dir)
    name = _name(folder, runner)
    monitor: Monitor | None = None

    def warn(message: str) -> None:
        if monitor is not None:
            monitor.warn(message)
        else:
            print(f"warning: {printable(message)}", file=sys.stderr, flush=True)

    display = ProgressDisplay(
        total_steps,
        (last_step or 0) + 1,
        live=runner.progress,
        line_every=line_every,
        sampling=sampling,
    )
    writer = MetricsWriter(
        folder,
        last_step,
        trackers=runner.trackers,
        name=name,
        project=runner.tracker_project,
        warn=warn,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(writer)
        stack.enter_context(display)
        server = None
        if runner.metrics_port:
            server = MetricsServer(
                runner.metrics_port, name, total_steps, runner.metrics_host, sampling
            )
            stack.callback(server.close)
        digests = DigestLog(folder, last_step)
        step = (last_step or 0) + 1
        monitor = Monitor(folder, writer, display, runner, step, digests, server, listeners)
        stack.enter_context(contextlib.closing(monitor))
        yield monitor
        monitor.finish_samples()


def _name(folder: Path, runner: RunnerConfig) -> str:
    """For people: ``mine``, or ``mine/sft_log`` of a part of the run with its own metrics."""
    run_dir = Path("" if runner.run_dir == MISSING else runner.run_dir).absolute()
    try:
        return str(folder.absolute().relative_to(run_dir.parent))
    except ValueError:
        return folder.absolute().name
