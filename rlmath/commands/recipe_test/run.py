"""The two runs of a test and what is asked of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.commands.drill.material import make_model, rows, write_rows
from rlmath.commands.drill.shrink import Shrunk
from rlmath.commands.recipe_test.reads import unread, watch_reads
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.monitor import read_metrics
from rlmath.monitor.digests import read_digests

REWARD = "rollout/rewards"
LAST_STEPS = 5


@dataclass(frozen=True)
class Finding:
    """One thing that was asked.

    Attributes:
        name: What.
        ok: Whether it holds; ``None``: it cannot be said.
        text: With the numbers.
    """

    name: str
    ok: bool | None
    text: str


def run_test(shrunk: Shrunk, folder: Path, band: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Run a recipe straight, then its second half again from the checkpoint in the middle.

    Args:
        shrunk: The settings, with the steps of the run.
        folder: For model, problems and runs.
        band: ``low`` and ``high`` of the mean reward of the last steps; ``None``: none is stored.
    """
    config = shrunk.config
    write_rows(Path(config.data.train_paths[0]), rows(config.data))
    make_model(Path(config.model.path), shrunk.model, config)
    steps, half = config.runner.steps, config.runner.steps // 2
    straight = _run_settings(config, folder / "straight", save_every=half)
    reads = watch_reads(straight)
    failed = _train(straight)
    yield Finding("invariants", not failed, failed or f"{steps} steps, none violated")
    if failed:
        return
    left = unread(straight, reads, set(shrunk.changed) | {"runner.save_every"})
    said = f"set, and never read: {', '.join(left)}" if left else "every setting that is set"
    yield Finding("settings read", not left, said)
    resumed = _run_settings(config, folder / "resumed", save_every=0)
    checkpoint = folder / "straight" / "checkpoints" / f"step_{half:06d}"
    resumed = _with_runner(resumed, resume=str(checkpoint))
    failed = _train(resumed)
    yield Finding("resume is equal", *_compare(folder, half, steps, failed))
    yield _in_band(reward_of(folder / "straight"), band)


def _train(config: Config) -> str:
    """Train to the end; what went wrong, or nothing."""
    from rlmath.training import loop

    try:
        code = loop.run(config)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return f"exit code {code}" if code else ""


def _run_settings(config: Config, run_dir: Path, *, save_every: int) -> Config:
    return _with_runner(config, run_dir=str(run_dir), save_every=save_every, keep_checkpoints=3)


def _with_runner(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, runner=dataclasses.replace(config.runner, **changes))


def _compare(folder: Path, half: int, steps: int, failed: str) -> tuple[bool, str]:
    if failed:
        return False, failed
    runs = [
        {line["step"]: line for line in read_digests(folder / name)}
        for name in ("straight", "resumed")
    ]
    for step in range(half + 1, steps + 1):
        first, second = (run.get(step, {}) for run in runs)
        phases = [key for key in first if key not in ("settings", "time_s")]
        for phase in phases:
            if first[phase] != second.get(phase):
                return False, (
                    f"step {step} differs in {phase}; rlmath bisect {folder / 'straight'} "
                    f"{folder / 'resumed'} says where"
                )
        if not phases:
            return False, f"step {step} has no digests"
    return True, f"steps {half + 1} to {steps} bit by bit, from the checkpoint of step {half}"


def reward_of(run_dir: Path) -> float:
    """Mean reward of the last steps of a run."""
    values = [line[REWARD] for line in read_metrics(run_dir) if line.get(REWARD) is not None]
    last = values[-LAST_STEPS:]
    return sum(last) / len(last) if last else float("nan")


def _in_band(reward: float, band: Mapping[str, Any] | None) -> Finding:
    text = f"mean of the last {LAST_STEPS} steps {reward:.3f}"
    if band is None:
        return Finding("reward in band", None, f"{text}; no band is stored (--write-band)")
    low, high = band["low"], band["high"]
    return Finding("reward in band", low <= reward <= high, f"{text}, band {low:g} to {high:g}")


def band_file(folders: list[Path], words: list[str]) -> Path | None:
    """Where the band of an experiment or a recipe is, or would be: beside its file.

    Args:
        folders: With groups, the project's own first.
        words: Of the command line.
    """
    if len(words) != 1:
        return None  # With other settings, other rewards.
    name = words[0].partition("=")[2] or words[0]
    for folder in folders:
        for group in ("experiment", "recipe"):
            if (folder / group / f"{name}.yaml").is_file():
                return folder / group / f"{name}.band.json"
    return None


def read_band(path: Path | None) -> dict[str, Any] | None:
    """The band of a file; ``None``: there is none."""
    if path is None or not path.is_file():
        return None
    try:
        band = json.loads(path.read_text(encoding="utf-8"))
        return {"low": float(band["low"]), "high": float(band["high"]), **band}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a band with low and high ({error})") from error
