"""The band of a recipe's reward: where thirty steps of the shrunk recipe end.

The learning rate of a real model teaches the shrunk one nothing in thirty steps, and a band around
nothing learned would hold whatever a recipe does. So the learning rate is multiplied by a factor
that is stored with the band: a recipe whose learning rate changes leaves its band.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.errors import UserError
from rlmath.monitor import read_metrics

REWARD = "rollout/rewards"
LAST_STEPS = 10
# Runs that a band is measured by: the recipe's own seeds, and others.
SEEDS = 3
# Learning rate of the shrunk model in a test. (Its head start takes 2e-3.)
LEARNING_RATE = 5e-4
# Margin on either side of the measured values, relative to the gain.
MARGIN = 1 / 3


@dataclass(frozen=True)
class Band:
    """Between which rewards a recipe has to end."""

    steps: int
    lr_factor: float  # Factor of the recipe's learning rate.
    start: float  # Mean reward of step 1, before any update, over the seeds.
    low: float  # Least mean reward of the last LAST_STEPS steps.
    high: float
    measured: tuple[float, ...]  # Mean for each seed.


def lr_factor(lr: float) -> float:
    """Factor that makes a recipe's learning rate one that the shrunk model learns from."""
    return float(f"{LEARNING_RATE / lr:.4g}") if lr else 1.0


def band_of(steps: int, factor: float, starts: Sequence[float], measured: Sequence[float]) -> Band:
    """The band around the measured values: from the least to the largest, and ``MARGIN`` of the way
    from the start to their mean on either side. Raises UserError: a recipe that learns nothing
    would be in it."""
    start, mean = sum(starts) / len(starts), sum(measured) / len(measured)
    margin = MARGIN * abs(mean - start)
    low, high = min(measured) - margin, max(measured) + margin
    if not low > start and not high < start:
        ends = ", ".join(f"{one:.3f}" for one in measured)
        raise UserError(
            f"--write-band: the reward of {len(measured)} seeds goes from {start:.3f} to {ends}, "
            f"and a band with them, {low:.3f} to {high:.3f}, has its start in it: a recipe "
            "that learns nothing would pass"
        )
    return Band(
        steps,
        factor,
        round(start, 4),
        round(low, 4),
        round(high, 4),
        tuple(round(one, 4) for one in measured),
    )


def rewards_of(run_dir: Path) -> list[float]:
    lines = read_metrics(run_dir)
    return [line[REWARD] for line in lines if line.get(REWARD) is not None]


def reward_of(run_dir: Path) -> float:
    last = rewards_of(run_dir)[-LAST_STEPS:]
    return sum(last) / len(last) if last else float("nan")


def band_file(folders: Sequence[Path], words: Sequence[str]) -> Path | None:
    """Where the band of an experiment or a recipe is, or would be: beside its file."""
    if len(words) != 1:
        return None  # With other settings, other rewards.
    name = words[0].partition("=")[2] or words[0]
    for folder in folders:
        for group in ("experiment", "recipe"):
            if (folder / group / f"{name}.yaml").is_file():
                return folder / group / f"{name}.band.json"
    return None


def read_band(path: Path | None) -> Band | None:
    if path is None or not path.is_file():
        return None
    try:
        band = Band(**json.loads(path.read_text(encoding="utf-8")))
        return dataclasses.replace(band, measured=tuple(band.measured))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a band of --write-band ({error})") from error


def write_band(path: Path, band: Band) -> None:
    path.write_text(json.dumps(dataclasses.asdict(band)) + "\n", encoding="utf-8")
