"""The two runs of a test and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmath.commands.drill.material import write_material
from rlmath.commands.drill.shrink import Shrunk
from rlmath.commands.recipe_test.band import LAST_STEPS, Band, reward_of
from rlmath.commands.recipe_test.reads import unread, watch_reads
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.errors import UserError
from rlmath.monitor.digests import read_digests


@dataclass(frozen=True)
class Finding:
    """One check; ``ok``: whether it holds, ``None`` if unknown."""

    name: str
    ok: bool | None
    text: str


def run_test(shrunk: Shrunk, folder: Path, band: Band | None) -> Iterator[Finding]:
    """Run a recipe straight, then its second half again from the checkpoint in the middle.
    ``band``: expected mean reward of the last steps; ``None``: none is stored."""
    config = shrunk.config
    write_material(shrunk)
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
    resumed = replace_values(resumed, {"runner.resume": str(checkpoint)})
    failed = _train(resumed)
    yield Finding("resume is equal", *_compare(folder, half, steps, failed))
    yield _in_band(reward_of(folder / "straight"), band)


def _train(config: Config) -> str:
    """Train to the end; returns the error, or an empty text."""
    from rlmath.training import loop

    try:
        code = loop.run(config)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return f"exit code {code}" if code else ""


def _run_settings(config: Config, run_dir: Path, *, save_every: int) -> Config:
    values = {"run_dir": str(run_dir), "save_every": save_every, "keep_checkpoints": 3}
    return replace_values(config, {f"runner.{key}": value for key, value in values.items()})


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


def another_seed(shrunk: Shrunk, folder: Path, seed: int) -> Path:
    """Run the recipe straight with another seed, after :func:`run_test` made model and problems.
    Raises UserError: the run fails."""
    run_dir = folder / f"seed_{seed}"
    config = _run_settings(shrunk.config, run_dir, save_every=0)
    failed = _train(replace_values(config, {"data.seed": seed, "runner.seed": seed}))
    if failed:
        raise UserError(f"runner.seed={seed}: {failed}")
    return run_dir


def _in_band(reward: float, band: Band | None) -> Finding:
    text = f"mean of the last {LAST_STEPS} steps {reward:.3f}"
    if band is None:
        return Finding("reward in band", None, f"{text}; no band is stored (--write-band)")
    inside = band.low <= reward <= band.high
    return Finding(
        "reward in band",
        inside,
        f"{text}, band {band.low:g} to {band.high:g}; before the first update {band.start:g}",
    )
