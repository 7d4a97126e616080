from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmath.commands.drill.fault import Fault, Scene, scene_fault
from rlmath.commands.drill.in_engines import spec_of
from rlmath.commands.drill.in_ranks import plant_in_ranks, replace
from rlmath.commands.drill.in_update import begin_the_schedule_again, lose_the_moments
from rlmath.config.schema import Config

RESUMED = "check: checksums of the checkpoint"


@contextlib.contextmanager
def resume_without(scene: Scene, lose: str) -> Iterator[None]:
    """A resume that loses a part of the optimizer's state."""
    folder = scene.folder / f"resumed_without_{lose}"
    folder.mkdir(parents=True, exist_ok=True)
    scene.run.actor.save_checkpoint(folder)
    with plant_in_ranks(scene, functools.partial(_restore_nothing, name=lose)):
        scene.run.actor.load_checkpoint(folder)
    yield


def _restore_nothing(worker: Any, name: str) -> None:
    from rlmath.checkpoint import state

    if name == "load_optimizer_state":
        lose_the_moments(worker)
    else:
        begin_the_schedule_again(worker)
    replace(worker, state, name, lambda _: lambda *_: None)


def _no_k(config: Config) -> str | None:
    spec = spec_of(config.model.path)
    if spec is not None and spec.latent is not None:
        return "latent attention: there is no k_proj"
    return None


FAULTS: list[Fault] = [
    Fault(
        "resumed_optimizer",
        "a resume does not restore the optimizer's state",
        "ranks",
        RESUMED,
        "state was not restored as it was saved",
        functools.partial(resume_without, lose="load_optimizer_state"),
        latest=2,
    ),
    Fault(
        "resumed_schedule",
        "a resume does not restore the schedule",
        "ranks",
        RESUMED,
        "step of the learning-rate schedule",
        functools.partial(resume_without, lose="load_schedule_state"),
        latest=2,
    ),
]


@scene_fault(
    FAULTS,
    "exported_k_v",
    "check: the export's tensors",
    "the exported model is not the trained one.* differs",
    missing=_no_k,
)
def export_wrong(scene: Scene) -> Iterator[None]:
    """The export has k for v in one layer."""
    from safetensors.torch import load_file, save_file

    from rlmath.training.summary import check_export

    folder = Path(scene.folder, "exported")
    scene.run.sampling.pool.sleep()
    scene.run.actor.save_hf(folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        # Few layers of a model with linear attention have one.
        for name in [n for n in tensors if n.endswith(".self_attn.k_proj.weight")][:1]:
            other = name.replace("k_proj", "v_proj")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    check_export(scene.run, folder, None)
    yield
