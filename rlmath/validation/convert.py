"""Conversion between checkpoints and Hugging Face folders, checked tensor by tensor.

Checkpoints hold whole tensors in pieces of any layout, so one process converts them with tensor and
pipeline parallelism of 1, whatever the run had. It needs memory for the model once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch

from rlmath.device import Platform
from rlmath.errors import UserError
from rlmath.model.lora import Lora, from_described
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.monitor.run_settings import CONFIG_FILE, settings_in
from rlmath.plugins import PluginError
from rlmath.plugins.loading import use
from rlmath.validation.processes import ONE_RANK
from rlmath.weights.fingerprint import add, compare_fingerprints, fingerprint
from rlmath.weights.gather import BucketGatherer, Merge
from rlmath.weights.hf_files import HfFolderReader
from rlmath.weights.megatron import save_to_hf
from rlmath.weights.model_folder import Foreign, check_target
from rlmath.weights.pieces import hf_shapes

_ACTOR = "actor"


@dataclasses.dataclass(frozen=True)
class CheckpointModel:
    folder: Path
    spec: dict[str, Any]
    dtype: torch.dtype
    layout: dict[str, int]  # Tensor, pipeline and data parallelism of the run.
    # Adapters, if the checkpoint has those alone; None: it has all weights.
    lora: Lora | None = None
    base_fingerprint: int | None = None  # Fingerprint of the model that the adapters belong to.


def read_checkpoint(path: str | Path) -> CheckpointModel:
    """Find the model in a checkpoint: ``checkpoints/step_...`` or the ``actor`` folder in it.
    Raises UserError: it is neither."""
    for folder in (Path(path) / _ACTOR, Path(path)):
        about = folder / "about.json"
        if about.is_file():
            saved = json.loads(about.read_text(encoding="utf-8"))
            dtype = getattr(torch, saved["dtype"])
            lora = None if saved.get("lora") is None else from_described(saved["lora"])
            return CheckpointModel(
                folder, saved["shape"], dtype, saved["layout"], lora, saved.get("base")
            )
    raise UserError(
        f"{path} is no checkpoint: it has neither {_ACTOR}/about.json nor about.json; give a "
        "folder such as runs/<run>/checkpoints/step_000050"
    )


def _config_of_run(path: str | Path) -> Path | None:
    """The settings of a checkpoint's run, above it; ``None``: there are none."""
    found = (parent / CONFIG_FILE for parent in Path(path).resolve().parents)
    return next((file for file in found if file.is_file()), None)


def use_plugins_of_run(path: str | Path) -> None:
    """Import the plug-ins of a checkpoint's run, one of which may have the model's family. Raises
    UserError: one does not exist any more."""
    config = _config_of_run(path)
    for place in (settings_in(config).get("plugins") if config else None) or ():
        try:
            use(str(place))
        except PluginError as error:
            raise UserError(
                f"{config}: plugins=[{place}]: {error}; give the file that has the model's "
                "family with plugins=[FILE], or plugins=[] if it is one of rlmath's own"
            ) from error


def model_of_run(path: str | Path) -> Path:
    """The Hugging Face folder from which a checkpoint's run started, by the run's config.yaml.
    Raises UserError: there is no config.yaml above the checkpoint, or its model is missing."""
    config = _config_of_run(path)
    if config is None:
        raise UserError(
            f"no {CONFIG_FILE} above {path}; name the model that it started from: model.path=FOLDER"
        )
    model = Path(str(settings_in(config)["model"]["path"]))
    if not (model / "config.json").is_file():
        raise UserError(
            f"{config} names the model {model}, which is not there now; "
            "give it with model.path=FOLDER"
        )
    return model


def to_hf(
    platform: Platform,
    checkpoint: str | Path,
    folder: str | Path,
    source: str | Path,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder, read it and compare every tensor.
    Returns number of tensors, all equal bit by bit.

    Raises:
        UserError: The checkpoint is of another model than ``source``, or ``folder`` holds files
            that are not a model's.
        WeightsError: A written tensor differs.
    """
    from rlmath.actor.model import ModelSettings, build_model

    saved = read_checkpoint(checkpoint)
    check_export_target(folder, checkpoint, source, overwrite)
    spec = read_model_spec(source)
    _check_same_model(saved, spec, source)
    module = build_model(spec, ONE_RANK, platform, ModelSettings(saved.dtype), spec.max_positions)
    parallel = ParallelRank.from_megatron()
    merge = None
    if saved.lora is not None:
        merge = _attach_adapters(module, saved, source, spec, platform)
    load_weights(module, saved.folder)
    gatherer = BucketGatherer([module], spec, parallel, merge=merge)
    save_to_hf(gatherer, spec, folder, source, overwrite=overwrite)
    held = gatherer.fingerprints()
    compare_fingerprints(held, folder_fingerprints(folder), str(folder))
    return len(held)


def _attach_adapters(
    module: torch.nn.Module,
    saved: CheckpointModel,
    source: str | Path,
    spec: ModelSpec,
    platform: Platform,
) -> Merge:
    """Load the base model, attach a checkpoint's adapters, and return a function that merges them.
    Raises UserError: ``source`` is not the model that the adapters were trained on."""
    from rlmath.actor.lora import Merger, attach_adapters
    from rlmath.weights.megatron import load_from_hf

    assert saved.lora is not None
    parallel = ParallelRank.from_megatron()
    load_from_hf([module], source, spec, parallel)
    found = BucketGatherer([module], spec, parallel).fingerprints().values()
    if functools.reduce(add, found) != saved.base_fingerprint:
        raise UserError(
            f"{saved.folder} has adapters of another model than {source}: its weights differ from "
            "those that they were trained on; give the folder that the run started from"
        )
    attach_adapters(module, spec, parallel, saved.lora)
    return Merger(module, lambda values: values, platform.torch_device)


def check_export_target(
    folder: str | Path, checkpoint: str | Path, source: str | Path, overwrite: bool
) -> None:
    """Refuse to export where files would be lost, before anything slow starts.

    ``overwrite`` allows everything but a file and the folders that the export reads. Raises
    UserError: See :func:`rlmath.weights.model_folder.check_target`.
    """
    read = Path(checkpoint), Path(source)
    try:
        check_target(folder, sources=read)
    except Foreign:
        if not overwrite:
            raise


def to_megatron(
    platform: Platform, source: str | Path, checkpoint: str | Path, dtype: torch.dtype
) -> int:
    """Write a Hugging Face folder's weights as a checkpoint, load it and compare every tensor.

    The checkpoint has only weights; any layout can load it. Returns number of tensors, all equal
    bit by bit. ``checkpoint``: folder to write; ``actor`` in it must not be there yet. Raises
    UserError: the folder has a checkpoint already; WeightsError: a written tensor differs.
    """
    from rlmath.actor.model import ModelSettings
    from rlmath.actor.policy import MegatronActor
    from rlmath.actor.settings import ActorSettings
    from rlmath.checkpoint.state import save_model

    if (Path(checkpoint) / _ACTOR).exists():
        raise UserError(f"{checkpoint} has a checkpoint already; choose another folder")
    spec = read_model_spec(source)
    settings = ActorSettings(
        model_path=str(source),
        model=ModelSettings(dtype),
        optimizer=None,
        temperature=1.0,
        max_tokens_per_microbatch=1,
        max_sequence_length=spec.max_positions,
    )
    actor = MegatronActor(settings, ONE_RANK, platform)
    save_model(actor, checkpoint, _ACTOR)
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter.fill_(float("nan"))
    load_weights(actor.module, Path(checkpoint) / _ACTOR)
    held = BucketGatherer(actor.chunks, spec, actor.parallel).fingerprints()
    compare_fingerprints(folder_fingerprints(source, dtype), held, str(checkpoint))
    return len(held)


def load_weights(module: torch.nn.Module, folder: Path) -> None:
    """Fill a Megatron model from the tensors of a checkpoint, and read nothing else of it. Raises
    UserError: the checkpoint lacks a tensor, or cannot be read."""
    from megatron.core import dist_checkpointing

    from rlmath.actor.lora import has_adapters
    from rlmath.checkpoint.model_state import sharded_weights
    from rlmath.checkpoint.reference_state import trained_names

    wanted = sharded_weights(module)
    # Under LoRA the rest is the base model, which is already loaded.
    trained = set(trained_names(module)) if has_adapters(module) else set(wanted)
    wanted = {key: value for key, value in wanted.items() if key in trained}
    try:
        state = dist_checkpointing.load({"model": wanted}, str(folder))
    except Exception as error:
        raise UserError(f"{folder} cannot be loaded: {error}") from error
    result = module.load_state_dict(state["model"], strict=False)
    missing = [key for key in result.missing_keys if key in trained]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing[:5])}")


def _check_same_model(saved: CheckpointModel, spec: ModelSpec, source: str | Path) -> None:
    ours = json.loads(json.dumps(dataclasses.asdict(spec)))
    differing = [key for key in ours if key in saved.spec and saved.spec[key] != ours[key]]
    if differing:
        was = ", ".join(f"{key}={saved.spec.get(key)}" for key in differing)
        now = ", ".join(f"{key}={ours[key]}" for key in differing)
        raise UserError(f"{saved.folder} has {was}, but {source}/config.json says {now}")


def folder_fingerprints(folder: str | Path, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Fingerprints of a folder's tensors, converted to ``dtype``."""
    spec = read_model_spec(folder)
    with HfFolderReader(folder, spec) as reader:
        names = [n for n in reader.names() if n in hf_shapes(spec)]
        return {
            name: fingerprint(reader.read(name).to(dtype or reader.dtype(name))) for name in names
        }
