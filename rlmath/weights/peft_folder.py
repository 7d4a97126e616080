"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT names the model ``base_model.model`` and each matrix's adapter ``lora_A`` and ``lora_B``, so a
tensor is ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlmath.errors import WeightsError
from rlmath.model.lora import Lora, adapter_shapes
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.model_folder import open_tensors, replacing_folder
from rlmath.weights.parameters import LocalParameter
from rlmath.weights.pieces import NOT_FINITE, first_of

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields that change an adapter's computation, with their neutral values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
}


def adapter_config(lora: Lora, base_model: str) -> dict[str, Any]:
    """Content of ``adapter_config.json``. ``lora``: the adapters. ``base_model``: the base model,
    as a folder or a name on the Hub."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "layers_to_transform": None if lora.layers is None else list(lora.layers),
        "layers_pattern": None if lora.layers is None else "layers",
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def write_adapters(
    folder: str | Path, lora: Lora, base_model: str, tensors: Mapping[str, Tensor]
) -> None:
    """Write a PEFT folder; it appears when it is complete, and replaces an older one.

    Args:
        folder: Target; other files in it are kept.
        base_model: As in :func:`adapter_config`.
        tensors: Tensors by the names of ``adapter_shapes``.
    """
    with replacing_folder(Path(folder)) as partial:
        config = json.dumps(adapter_config(lora, base_model), indent=2)
        (partial / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        named = {_PREFIX + name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        save_file(named, partial / TENSORS_FILE, metadata={"format": "pt"})


def save_adapters(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    base_model: str,
    spec: ModelSpec,
    parallel: ParallelRank,
    lora: Lora,
) -> None:
    """Gather the adapters and write them as a PEFT folder.

    Collective over all ranks; global rank 0 writes. Returns on every rank when the folder is
    complete.
    """
    gatherer = BucketGatherer(model_chunks, spec, parallel, adapters=lora)
    tensors = {name: one.cpu() for bucket in gatherer.gather(destination=0) for name, one in bucket}
    if parallel.global_rank == 0:
        write_adapters(folder, lora, base_model, tensors)
    gatherer.wait_for_all()


def config_problems(folder: str | Path, lora: Lora) -> list[str]:
    """Differences between a PEFT folder's ``adapter_config.json`` and a run's adapters, as text.
    Raises WeightsError: the file cannot be read."""
    path = Path(folder) / CONFIG_FILE
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        fields = dict(held)
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(
            f"{path} cannot be read ({error}); a folder that PEFT's save_pretrained, or a run with "
            "actor.lora, wrote has it"
        ) from None
    problems = [
        f"its {name} is {fields[name]!r}, and here it has to be {plain[0]!r}"
        for name, plain in _PLAIN.items()
        if name in fields and fields[name] not in plain
    ]
    for name, setting, own in (
        ("r", "rank", lora.rank),
        ("lora_alpha", "alpha", lora.alpha),
    ):
        if fields.get(name) != own:
            problems.append(f"its {name} is {fields.get(name)!r}, and actor.lora.{setting} {own:g}")
    return problems


def tensor_problems(folder: str | Path, lora: Lora, spec: ModelSpec) -> list[str]:
    """Tensors of a PEFT folder that are missing, unknown or of another shape, as text. Raises
    WeightsError: the tensors cannot be read."""
    wanted = adapter_shapes(spec, lora)
    with _open(folder) as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    found = {name.removeprefix(_PREFIX): shape for name, shape in held.items()}
    return [
        *(f"{name} {wanted[name]} is missing" for name in wanted if name not in found),
        *(f"{name} {found[name]} is unknown" for name in sorted(found) if name not in wanted),
        *(
            f"{name} is {found[name]}, and has to be {wanted[name]}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ),
    ]


def check_adapters(folder: str | Path, lora: Lora, spec: ModelSpec) -> None:
    """Compare a PEFT folder with a run's adapters, and check its values. Raises WeightsError: names
    the differences, or a tensor with NaN or infinity."""
    problems = config_problems(folder, lora) or tensor_problems(folder, lora, spec)
    if problems:
        raise WeightsError(
            f"{folder} does not fit actor.lora: {first_of(problems)}; set rank, alpha, targets and "
            f"layers of actor.lora as they are in its {CONFIG_FILE}"
        )
    with _open(folder) as file:
        for name in file.keys():  # noqa: SIM118
            if not file.get_tensor(name).isfinite().all():
                raise WeightsError(f"{name.removeprefix(_PREFIX)} in {folder} {NOT_FINITE}")


@torch.no_grad()
def load_adapters(
    parameters: list[LocalParameter], folder: str | Path, lora: Lora, spec: ModelSpec
) -> None:
    """Fill this rank's adapters from a PEFT folder. Needs no communication. Raises WeightsError: it
    does not fit, cannot be read, or has NaN or infinity. ``parameters``: from ``local_adapters``.
    ``folder``: folder written by PEFT or by :func:`write_adapters`."""
    check_adapters(folder, lora, spec)
    with _open(folder) as file:
        for parameter in parameters:
            parameter.tensor.zero_()
            for piece in parameter.layout.pieces:
                run = slice(piece.hf_start, piece.hf_start + piece.length)
                stored = file.get_slice(_PREFIX + piece.hf_name)
                values = stored[run] if piece.dim == 0 else stored[:, run]
                parameter.tensor.narrow(piece.dim, piece.local_start, piece.length).copy_(values)


def _open(folder: str | Path) -> Any:
    path = Path(folder) / TENSORS_FILE
    try:
        return open_tensors(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None
