from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmath.commands.plugin_test.finding import Finding, findings
from rlmath.monitor.trackers import TRACKERS, TrackedRun

_SETTINGS = {"algorithm.loss": "ppo_clip", "runner.seed": 0, "actor.lora.rank": None}
_METRICS = {"reward/mean": 0.5, "actor/grad_norm": math.nan, "timing/step_s": math.inf}


def check_tracker(name: str) -> Iterator[Finding]:
    part = _Part(name)
    return findings(
        {
            "takes settings, metrics that are not finite, and texts": part.takes,
            "a step without metrics is no error": part.empty,
            "a resumed run keeps what was written": part.resumes,
        }
    )


@dataclass(frozen=True)
class _Part:
    name: str

    def track(self, folder: Path, steps: range, last_step: int | None = None) -> None:
        tracker = TRACKERS.get(self.name)(TrackedRun(folder, "test", "rlmath", last_step))
        tracker.settings("runner:\n  seed: 0\n", _SETTINGS, ["reward/mean"])
        for step in steps:
            tracker.step(step, float(step), _METRICS, {"samples": "a text"})
        tracker.close()

    def takes(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            self.track(Path(folder), range(1, 4))
        yield from ()

    def empty(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            tracker = TRACKERS.get(self.name)(TrackedRun(Path(folder), "test", "rlmath"))
            tracker.step(1, 0.0, {}, {})
            tracker.close()
        yield from ()

    def resumes(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            self.track(Path(folder), range(1, 4))
            before = _sizes(Path(folder))
            self.track(Path(folder), range(3, 6), last_step=2)
            now = _sizes(Path(folder))
        for name, size in before.items():
            if now.get(name, 0) < size:
                yield f"{name} had {size} bytes and has {now.get(name, 0)} after the run resumed"


def _sizes(folder: Path) -> dict[str, int]:
    files = (one for one in folder.rglob("*") if one.is_file())
    return {str(one.relative_to(folder)): one.stat().st_size for one in files}
