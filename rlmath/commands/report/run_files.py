"""What a run has left in its folder, read while it may still be written."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.checks import attempts
from rlmath.errors import UserError
from rlmath.monitor.monitor import WARNINGS_FILE
from rlmath.monitor.samples import FOLDER as SAMPLES
from rlmath.monitor.summary import SUMMARY_FILE
from rlmath.monitor.writer import DECISIONS_FILE, METRICS_FILE, STEP, read_metrics
from rlmath.utils.run_lock import LOCK_FILE

TRAINING = "step"
_SAMPLES_FILE = re.compile(r"((?:step|eval\w*?))_(\d+)\.jsonl(?:\.gz)?")
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class SamplesFile:
    """A file of ``samples/``.

    Attributes:
        kind: ``step`` (training), ``eval`` or ``eval_<benchmark>``.
    """

    kind: str
    step: int
    path: Path


@dataclass(frozen=True)
class RunFiles:
    """A run as its files have it.

    Attributes:
        settings: Of the last attempt, by full key.
        metrics: The lines of ``metrics.jsonl``.
        decisions: The lines of ``decisions.jsonl``; a step that was repeated has its last ones.
        warnings: The lines of ``warnings.jsonl``.
        resumed_after: Steps after which the run was resumed.
        changes: Settings that an attempt changed: step after which, and in words.
        summary: Of ``summary.json``.
        samples: In the order of their steps.
        damaged: Lines that could not be read, by file; counted while samples are read.
    """

    folder: Path
    settings: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    resumed_after: list[int]
    changes: list[tuple[int, str]]
    summary: Mapping[str, Any]
    samples: list[SamplesFile]
    damaged: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def last_step(self) -> int:
        """The newest step in the metrics; 0 before the first."""
        return max((line[STEP] for line in self.metrics), default=0)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was done and the summary is of it."""
        wanted = self.settings.get("runner.steps")
        return self.last_step == wanted and self.summary.get("steps") == wanted

    def is_running(self) -> bool:
        """Whether the process that holds the folder lives on this machine.

        The lock itself is not tried: a run that starts at that moment would find it held.
        """
        try:
            holder = _HOLDER.match((self.folder / LOCK_FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return False
        if holder is None or holder[2] != socket.gethostname():
            return False
        try:
            os.kill(int(holder[1]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return not self.is_finished

    def state(self) -> str:
        """How far the run is, in words."""
        wanted = self.settings.get("runner.steps")
        of = f" of {wanted}" if wanted is not None else ""
        if self.is_finished:
            return f"finished: {self.last_step} steps"
        where = f"step {self.last_step}{of}"
        return f"running: {where}" if self.is_running() else f"ended or interrupted at {where}"

    def rows(self, file: SamplesFile) -> Iterator[dict[str, Any]]:
        """The samples of a file; what cannot be read is left out and counted in ``damaged``."""
        with gzip.open(file.path) if file.path.suffix == ".gz" else file.path.open("rb") as lines:
            try:
                for line in lines:
                    row = _object(line)
                    if row is None or not _is_sample(row):
                        self.damaged[file.path.name] += 1
                    else:
                        yield row
            except (EOFError, gzip.BadGzipFile, zlib.error):
                self.damaged[file.path.name] += 1


def read_run(folder: str | Path) -> RunFiles:
    """Read a run's folder; samples are only listed.

    Raises:
        UserError: There is no run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the runner.run_dir of a run")
    if not (folder / METRICS_FILE).is_file() and not (folder / SAMPLES).is_dir():
        raise UserError(
            f"{folder} has neither {METRICS_FILE} nor {SAMPLES}/; give the runner.run_dir of a "
            "run that has begun its first step"
        )
    found = attempts.attempts(folder)
    history = [(after, "; ".join(map(str, changes))) for after, changes in attempts.history(found)]
    return RunFiles(
        folder=folder,
        settings=attempts.flat(attempts.in_force(found, None)) if found else {},
        metrics=read_metrics(folder),
        decisions=_decisions(folder),
        warnings=_warnings(folder),
        resumed_after=attempts.resumed_after(folder),
        changes=history,
        summary=_object((folder / SUMMARY_FILE).read_bytes()) or {}
        if (folder / SUMMARY_FILE).is_file()
        else {},
        samples=_samples(folder),
    )


def _decisions(folder: Path) -> list[dict[str, Any]]:
    """By step and subject the last one: a step that is repeated after a resume writes again."""
    lines = [line for line in _lines(folder / DECISIONS_FILE) if "what" in line]
    by_key = {(line[STEP], str(line["what"])): line for line in lines}
    return [by_key[key] for key in sorted(by_key)]


def _warnings(folder: Path) -> list[dict[str, Any]]:
    """Since the run began: one that starts over in the same folder adds to the file."""
    starts = [
        line["started"]
        for line in _objects(folder / attempts.ATTEMPTS_FILE)
        if (line.get("after_step") == 0 or line.get("begins"))
        and isinstance(line.get("started"), str)
    ]
    began = datetime.datetime.fromisoformat(starts[-1]).timestamp() if starts else 0.0
    found = [line for line in _lines(folder / WARNINGS_FILE) if "message" in line]
    recent = [line for line in found if line.get("time_s", 0.0) >= began]
    # A step that was repeated warns again.
    return list({(line[STEP], str(line["message"])): line for line in recent}.values())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of lines with steps, those that can be read."""
    return [line for line in _objects(path) if isinstance(line.get(STEP), int)]


def _objects(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [line for text in path.read_bytes().splitlines() if (line := _object(text))]


def _samples(folder: Path) -> list[SamplesFile]:
    found = [
        SamplesFile(match[1], int(match[2]), path)
        for path in (folder / SAMPLES).glob("*.jsonl*")
        if (match := _SAMPLES_FILE.fullmatch(path.name))
    ]
    return sorted(found, key=lambda file: (file.step, file.kind))


def _object(line: bytes) -> dict[str, Any] | None:
    """A line of JSON; bytes that are not UTF-8 become the replacement character."""
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_sample(row: Mapping[str, Any]) -> bool:
    texts = all(isinstance(row.get(key), str) for key in ("problem_id", "prompt", "response"))
    return texts and isinstance(row.get("response_tokens"), int)
