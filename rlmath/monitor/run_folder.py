"""A run's folder, for the commands that read one: it may still be written meanwhile."""

from __future__ import annotations

import datetime
import functools
import gzip
import itertools
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.errors import UserError
from rlmath.monitor.digests import DIGESTS_FILE, read_details, read_digests
from rlmath.monitor.files import json_object, json_objects
from rlmath.monitor.monitor import WARNINGS_FILE
from rlmath.monitor.run_settings import (
    ATTEMPTS_FILE,
    CONFIG_FILE,
    SFT_CONFIG_FILE,
    SFT_EXPORTED_FILE,
    Attempt,
    attempt_of,
    attempts,
    flat,
    history,
    resume_steps,
    settings_in,
)
from rlmath.monitor.samples import FOLDER as SAMPLES
from rlmath.monitor.summary import read_summary
from rlmath.monitor.writer import DECISIONS_FILE, METRICS_FILE, STEP, TIME, read_metrics
from rlmath.utils.run_lock import LOCK_FILE

TRAINING = "step"
SFT_LOG = "sft_log"
_STEPS_IN_ESTIMATE = 10
Row = Mapping[str, Any]
_SAMPLES_FILE = re.compile(r"((?:step|eval\w*?))_(\d+)\.jsonl(?:\.gz)?")
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class SamplesFile:
    kind: str
    step: int
    path: Path


class RunFolder:
    """A run as its files have it. Each file is read when it is first asked for, and then kept.
    ``folder``: the run's ``runner.run_dir``. ``is_sft``: ``rlmath sft`` alone has run there.
    ``damaged``: lines of samples that could not be read, by file, as far as files were read. Raises
    UserError: there is no run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.damaged: Counter[str] = Counter()
        if not self.folder.is_dir():
            raise UserError(f"{folder} is not a folder; give the runner.run_dir of a run")
        has_begun = (self.folder / METRICS_FILE).is_file() or (self.folder / SAMPLES).is_dir()
        self.is_sft = not has_begun and (self.folder / SFT_LOG / METRICS_FILE).is_file()
        self._log = self.folder / SFT_LOG if self.is_sft else self.folder
        if not has_begun and not self.is_sft:
            raise UserError(
                f"{folder} has neither {METRICS_FILE} nor {SAMPLES}/; give the runner.run_dir of a "
                "run that has begun its first step"
            )

    @property
    def checkpoints(self) -> str:
        return "sft_checkpoints" if self.is_sft else "checkpoints"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @functools.cached_property
    def attempts(self) -> list[Attempt]:
        if not self.is_sft:
            return attempts(self.folder)
        file = self.folder / SFT_CONFIG_FILE
        return [Attempt(0, settings_in(file))] if file.is_file() else []

    def settings_of(self, step: int) -> Mapping[str, Any]:
        """The settings of a step, nested as in YAML. Raises UserError: the run has not noted
        any."""
        if not self.attempts:
            raise UserError(f"{self.folder} has no {CONFIG_FILE}, so its settings are not known")
        return attempt_of(self.attempts, step).settings

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """The last attempt's, by full key; none where they are not known."""
        return flat(attempt_of(self.attempts, None).settings) if self.attempts else {}

    @functools.cached_property
    def changes(self) -> list[tuple[int, str]]:
        """Settings that an attempt changed: step after which, and in words."""
        return [(after, "; ".join(map(str, found))) for after, found in history(self.attempts)]

    @functools.cached_property
    def resumed_after(self) -> list[int]:
        return resume_steps(self._log)

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self._log)

    @functools.cached_property
    def decisions(self) -> list[dict[str, Any]]:
        """The lines of ``decisions.jsonl``: by step and subject the last one, for a step that is
        repeated after a resume writes again."""
        lines = [line for line in self._of_steps(DECISIONS_FILE) if "what" in line]
        by_key = {(line[STEP], str(line["what"])): line for line in lines}
        return [by_key[key] for key in sorted(by_key)]

    @functools.cached_property
    def warnings(self) -> list[dict[str, Any]]:
        """The lines of ``warnings.jsonl`` since the run began: one that starts over in the same
        folder adds to the file, and a step that was repeated warns again."""
        starts = [
            line["started"]
            for line in json_objects(self.folder / ATTEMPTS_FILE)
            if (line.get("after_step") == 0 or line.get("begins"))
            and isinstance(line.get("started"), str)
        ]
        began = datetime.datetime.fromisoformat(starts[-1]).timestamp() if starts else 0.0
        if self.is_sft and self.metrics:  # It notes no starts.
            first = self.metrics[0]
            began = first.get(TIME, 0.0) - (first.get("timing/step") or 0.0)
        found = [line for line in self._of_steps(WARNINGS_FILE) if "message" in line]
        recent = [line for line in found if line.get("time_s", 0.0) >= began]
        return list({(line[STEP], str(line["message"])): line for line in recent}.values())

    @functools.cached_property
    def digests(self) -> dict[int, dict[str, Any]]:
        """The digests of each step, by phase; those of a start are under the step before it. Raises
        UserError: there are none."""
        found: dict[int, dict[str, Any]] = {}
        for line in read_digests(self.folder):
            found.setdefault(line["step"], {}).update(line)
        if not found:
            raise UserError(
                f"{self.folder} has no {DIGESTS_FILE}: give the runner.run_dir of a run of `rlmath "
                "train` that has done a step"
            )
        return found

    def details(self, step: int) -> dict[str, Any] | None:
        """The digests of a step's items; ``None``: missing or damaged."""
        return read_details(self.folder, step)

    @functools.cached_property
    def samples(self) -> list[SamplesFile]:
        """The files of ``samples/`` in the order of their steps."""
        found = [
            SamplesFile(match[1], int(match[2]), path)
            for path in (self.folder / SAMPLES).glob("*.jsonl*")
            if (match := _SAMPLES_FILE.fullmatch(path.name))
        ]
        return sorted(found, key=lambda file: (file.step, file.kind))

    @property
    def training_steps(self) -> dict[int, SamplesFile]:
        return {file.step: file for file in self.samples if file.kind == TRAINING}

    def rows(self, file: SamplesFile) -> Iterator[dict[str, Any]]:
        """The samples of a file; unreadable ones are left out and counted in ``damaged``."""
        with gzip.open(file.path) if file.path.suffix == ".gz" else file.path.open("rb") as lines:
            try:
                for line in lines:
                    row = json_object(line)
                    if row is None or not _is_sample(row):
                        self.damaged[file.path.name] += 1
                    else:
                        yield row
            except (EOFError, gzip.BadGzipFile, zlib.error):
                self.damaged[file.path.name] += 1

    def no_samples(self, steps: str) -> UserError:
        """Says that steps have no training samples, and which have."""
        have = list(self.training_steps)
        has = f"steps {have[0]} to {have[-1]}" if have else "no step"
        return UserError(
            f"{self.folder} has no samples of {steps}; its samples/ has {has} "
            "(runner.samples_keep_gib)"
        )

    @property
    def last_step(self) -> int:
        """The newest step in the metrics; 0 before the first."""
        return max((line[STEP] for line in self.metrics), default=0)

    @property
    def total_steps(self) -> int:
        """The number of the run's last step; 0 where it is not known."""
        return int(self.settings.get("sft.steps" if self.is_sft else "runner.steps") or 0)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was done and the summary, or the model of an SFT, is of it."""
        done = read_summary(self.folder).get("steps")
        if self.is_sft:
            exported = json_objects(self.folder / SFT_EXPORTED_FILE)
            done = next((one.get("step") for one in exported), None)
        return bool(self.total_steps) and self.last_step == self.total_steps == done

    @functools.cached_property
    def holder(self) -> tuple[int, str] | None:
        """Process and machine of the lock, which stays when a run is killed."""
        try:
            text = (self.folder / LOCK_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        found = _HOLDER.match(text)
        return None if found is None else (int(found[1]), found[2])

    def is_running(self) -> bool:
        """Whether the process that holds the folder lives on this machine.

        The lock itself is not tried: a run that starts at that moment would find it held.
        """
        if self.holder is None or self.is_elsewhere():
            return False
        try:
            os.kill(self.holder[0], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return not self.is_finished

    def is_elsewhere(self) -> bool:
        """Whether another machine holds the folder; whether its process lives is not known here."""
        return self.holder is not None and self.holder[1] != socket.gethostname()

    def state(self) -> str:
        of = f" of {self.total_steps}" if self.total_steps else ""
        if self.is_finished:
            return f"finished: {self.last_step} steps"
        where = f"step {self.last_step}{of}"
        if self.is_running():
            return f"running: {where}"
        if self.holder is not None and self.is_elsewhere():
            return f"running on {self.holder[1]}, or killed there: {where}"
        return f"ended or interrupted at {where}"

    def pace_s(self, count: int | None = None) -> float | None:
        """Mean seconds of a step, by the last ten of the first ``count`` lines of the metrics;
        ``None``: too few. The first step of a start, which also compiles, is not counted."""
        found = self.metrics[:count][-_STEPS_IN_ESTIMATE - 1 :]
        starts = {0, *self.resumed_after}
        took = [
            now[TIME] - before[TIME]
            for before, now in itertools.pairwise(line for line in found if TIME in line)
            if before[STEP] not in starts
        ]
        return sum(took) / len(took) if took else None

    def _of_steps(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file, each about a step."""
        lines = json_objects(self._log / name)
        return [line for line in lines if isinstance(line.get(STEP), int)]


def row_key(row: Row) -> str:
    """``PROBLEM/INDEX`` of a sample, within its step."""
    return f"{row['problem_id']}/{row.get('index')}"


def _is_sample(row: Row) -> bool:
    texts = all(isinstance(row.get(key), str) for key in ("problem_id", "prompt", "response"))
    return texts and isinstance(row.get("response_tokens"), int)
