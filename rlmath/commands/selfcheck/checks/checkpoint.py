"""A checkpoint saved and loaded while engines are awake, and asleep: every bit has to come back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlmath.actor.group import ActorGroup
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.rollout.weight_sync import Verification, sync_weights
from rlmath.types import TrainingBatch
from rlmath.weights.fingerprint import fingerprint

SAMPLES = 16
GIB = 2**30


def run(node: Node, record: Record) -> None:
    """Save, train on, load, and compare weights and optimizer state; then sample again."""
    config = parts.settings(node, "run", gpus=min(node.gpus, 2))
    wanted = parts.requests(node, SAMPLES)
    with parts.start(config, record) as (actor, pool):
        batch = parts.as_batch(wanted, parts.sample(pool, wanted))
        pool.sleep()
        parts.update(actor, batch)
        sync_weights(actor, pool, pool.weights_version + 1)
        folder = Path(node.folder) / "checkpoint"
        _save_and_load(record, "engines awake", actor, batch, folder)
        if node.on_cuda:
            pool.sleep()
            _save_and_load(record, "engines asleep", actor, batch, folder)
        else:
            record.not_applicable("engines asleep", "engines on a CPU never sleep")
        with record.phase("weight sync after the load"):
            sync_weights(actor, pool, pool.weights_version + 1, Verification(1))
            batch = parts.as_batch(wanted, parts.sample(pool, wanted))
            parts.hold_to_gate(record, "after the load", config, actor, batch, seed=0)


def _save_and_load(
    record: Record, name: str, actor: ActorGroup, batch: TrainingBatch, folder: Path
) -> None:
    """One checkpoint, with an update between save and load."""

    def measure(what: str, action: Callable[[Path], object]) -> None:
        actor.call(_reset_peak)
        started_s = time.monotonic()
        with record.phase(f"{what}, {name}"):
            action(folder)
        record.figure(f"{name} {what}", time.monotonic() - started_s, "s", key=True)
        peak_gib = max(actor.call(peak_memory_gib))
        record.figure(f"{name} peak memory of a rank in the {what}", peak_gib, "GiB")

    shutil.rmtree(folder, ignore_errors=True)
    saved = actor.call(state_fingerprints)
    measure("save", actor.save_checkpoint)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    record.figure(f"{name} size", size / GIB, "GiB")
    parts.update(actor, batch, seed=1)
    moved = _differences(saved, actor.call(state_fingerprints))
    record.require(bool(moved), f"{name}: the update after the save changed nothing")
    measure("load", actor.load_checkpoint)
    loaded = actor.call(state_fingerprints)
    wrong = _differences(saved, loaded)
    total = sum(map(len, saved))
    record.figure(f"{name} tensors that came back", f"{total - len(wrong)} of {total}", limit="all")
    record.require(
        not wrong,
        f"{name}: {len(wrong)} of {total} tensors differ after the load: {', '.join(wrong[:5])}",
    )
    shutil.rmtree(folder)


def state_fingerprints(worker: Any) -> dict[str, int]:
    """Fingerprints of every parameter and every tensor of the optimizer's state, on one rank."""
    actor = worker.actor
    actor.device_state.load("parameters", "gradients", "optimizer")
    found = {
        f"weight {name}": fingerprint(parameter.detach())
        for name, parameter in actor.module.named_parameters()
    }
    return found | {name: fingerprint(tensor) for name, tensor in optimizer_tensors(actor)}


def optimizer_tensors(actor: Any) -> Iterator[tuple[str, Tensor]]:
    """Main parameters and Adam's state, by their place in the optimizer."""
    optimizer = actor.optimizer
    for part, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = one.optimizer
        parameters = [p for group in inner.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            place = f"optimizer {part}.{number}"
            yield f"{place} main parameter", parameter.detach()
            for key, value in inner.state[parameter].items():
                if isinstance(value, Tensor):
                    yield f"{place} {key}", value


def _differences(first: list[dict[str, int]], second: list[dict[str, int]]) -> list[str]:
    return [
        f"rank {rank} {name}"
        for rank, (one, other) in enumerate(zip(first, second, strict=True))
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    ]


def peak_memory_gib(worker: Any) -> float:
    """Highest memory of a rank since :func:`_reset_peak`."""
    return float(worker.platform.peak_memory_gib())


def _reset_peak(worker: Any) -> None:
    worker.platform.reset_peak_memory()
