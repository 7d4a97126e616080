"""Checksums of each rank's optimizer state and the place in its schedule, saved with a checkpoint
and compared after loading: a resume that restores something else would go unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.optimizer_state import optimizer_parts

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NAMED = 3
# Elements that are in 64 bits at once: torch copies what it adds up in another type, which of a
# vocabulary's embedding has gigabytes.
_ELEMENTS_AT_ONCE = 1 << 22


def checksum(values: Tensor) -> int:
    """Sum of the values' bits, on their device."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = torch.atleast_1d(values.detach()).view(width)
    rows = max(1, _ELEMENTS_AT_ONCE * len(bits) // max(1, bits.numel()))
    return int(torch.stack([one.sum(dtype=torch.int64) for one in bits.split(rows)]).sum())


def optimizer_prints(optimizer: Any, scheduler: Any) -> dict[str, float]:
    """Checksums and counts of this rank's optimizer, by name."""
    found: dict[str, float] = {"step of the learning-rate schedule": int(scheduler.num_steps)}
    for part_number, part in enumerate(optimizer_parts(optimizer)):
        inner = part.optimizer
        for group_number, group in enumerate(inner.param_groups):
            for number, parameter in enumerate(group["params"]):
                shape = "x".join(map(str, parameter.shape))
                place = f"tensor {part_number}.{group_number}.{number} ({shape})"
                state = inner.state.get(parameter, {})
                found[f"main parameter of {place}"] = checksum(parameter)
                for name in _MOMENTS:
                    if name in state:
                        found[f"{name} of {place}"] = checksum(state[name])
                step = state.get("step", group.get("step", 0))
                found[f"Adam's step of {place}"] = float(step)
    return found


def save_prints(folder: Path, rank: int, prints: dict[str, float]) -> None:
    _path(folder, rank).write_text(json.dumps(prints) + "\n", encoding="utf-8")


def check_prints(folder: Path, rank: int, now: dict[str, float], *, same_layout: bool) -> None:
    """Compare the loaded state with the saved one. ``same_layout``: ranks have the parts that they
    had; else the schedule's step is compared alone. Raises BrokenCheckpoint: something was not
    restored."""
    path = _path(folder, rank if same_layout else 0)
    saved = json.loads(path.read_text(encoding="utf-8"))
    if not same_layout:
        saved = {name: saved[name] for name in list(saved)[:1]}
    wrong = [name for name, value in saved.items() if now.get(name) != value]
    if wrong:
        first = wrong[0]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise BrokenCheckpoint(
            f"rank {rank}: the optimizer's state was not restored as it was saved: "
            f"{', '.join(wrong[:_NAMED])}{more} of {len(saved)} differ ({first} was "
            f"{saved[first]}, and is {now.get(first)})"
        )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"optimizer_prints_{rank:05d}.json"
