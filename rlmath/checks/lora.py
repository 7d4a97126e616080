"""Requirements of ``actor.lora``: matrices and layers of the model, and a folder that fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.config.algorithm import ReferenceKind
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.schema import Config, Device, DType
from rlmath.errors import UserError, WeightsError
from rlmath.model.lora import (
    ALL_TARGETS,
    VLLM_RANKS,
    Lora,
    adapted_entries,
    adapter_parameters,
    model_targets,
)
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec
from rlmath.utils.close_names import did_you_mean

_UNMERGED = "actor.lora.rollout=unmerged"
# Families that have run in an engine with adapters (tests/engine/test_unmerged_families.py). The
# others: vLLM's Phi-3 has one adapter for query, key and value together, and one for gate
# and up; OLMo-2 runs on its transformers backend, whose adapters cannot be compared by name; an
# MoE's experts with adapters need Triton, which CPU engines lack; latent attention decodes with
# matrices that vLLM makes of kv_b_proj and ignores its adapter.
UNMERGED_FAMILIES = ("llama3", "qwen2", "qwen3", "mistral")


def lora_problems(config: Config, command: str) -> Iterator[str]:
    lora, algorithm = config.actor.lora, config.algorithm
    if not lora.rank:
        return
    for name in lora.targets or []:
        if name not in ALL_TARGETS:
            known = f"there are {', '.join(ALL_TARGETS)}{did_you_mean(name, ALL_TARGETS)}"
            yield f"actor.lora.targets: there is no {name}; {known}"
    for key, chosen in (("targets", lora.targets), ("layers", lora.layers)):
        if chosen == []:
            yield f"actor.lora.{key}=[]: nothing would be trained; give some, or null for all"
    averaged = algorithm.reference.kind is ReferenceKind.averaged
    if command == "train" and algorithm.kl_coef > 0 and averaged:
        yield (
            "algorithm.reference.kind=averaged: the average of two models' adapters is not the "
            "adapter of their average, with actor.lora.rank="
            f"{lora.rank}; use frozen (the base model, which costs no memory) or reset"
        )


def lora_model(config: Config, model: ModelSpec) -> Iterator[str]:
    """Errors of model, layout and the folder of ``init_from``."""
    lora = config.actor.lora
    if not lora.rank:
        return
    possible = model_targets(model)
    unknown = [name for name in lora.targets or [] if name not in possible]
    if foreign := [name for name in unknown if name in ALL_TARGETS]:
        yield (
            f"actor.lora.targets: {model.family.name} has no {', '.join(foreign)}; it has "
            f"{', '.join(possible)}"
        )
    beyond = [layer for layer in lora.layers or [] if not 0 <= layer < model.layers]
    if beyond:
        yield (
            f"actor.lora.layers: the model has layers 0 to {model.layers - 1}, and no "
            f"{', '.join(map(str, beyond))}"
        )
    if unknown or beyond or [] in (lora.targets, lora.layers):
        return
    adapters = adapters_of(lora, model, config.runner.seed)
    assert adapters is not None
    yield from _stages(config, model, adapters)
    trained, parameters = adapter_parameters(model, adapters), model.num_parameters
    if trained >= parameters:
        yield (
            f"actor.lora.rank={lora.rank}: the adapters have {trained:,} parameters and the model "
            f"{parameters:,}; use a lower rank, or 0 to train all weights"
        )
    if adapters.init_from is not None:
        yield from _merged_base_errors(Path(config.model.path), Path(adapters.init_from))
        # Imported late, because torch takes seconds.
        from rlmath.weights.peft_folder import check_adapters

        try:
            check_adapters(adapters.init_from, adapters, model)
        except WeightsError as error:
            yield f"actor.lora.init_from: {error}"


def _merged_base_errors(model: Path, adapters: Path) -> Iterator[str]:
    """A run exports its model with the adapters merged in, beside the adapters alone."""
    model, adapters = model.resolve(), adapters.resolve()
    if adapters == model.with_name(f"{model.name}_adapter"):
        yield (
            f"actor.lora.init_from: {adapters} is merged into model.path={model} already and would "
            "be added once more. Give the model that the adapters were trained on as model.path, "
            "or leave out init_from to train new adapters on the merged one"
        )


def _stages(config: Config, model: ModelSpec, adapters: Lora) -> Iterator[str]:
    """Each chunk of the model has an adapter. Layers differ in their matrices where some have
    experts or linear attention."""
    actor = config.actor
    adapted = {layer for _, layer in adapted_entries(model, adapters)}
    layout = Layout(
        pipeline_parallel=actor.pipeline_parallel,
        pipeline_layers=tuple(actor.pipeline_layers or ()),
        virtual_stages=actor.virtual_stages,
    )
    try:
        chunks_of_stages = layout.stage_chunks(model.layers)
    except UserError:
        return  # rlmath/checks/layout.py reports it.
    for stage, chunks in enumerate(chunks_of_stages):
        for chunk in chunks:
            if not adapted.isdisjoint(chunk):
                continue
            yield (
                f"actor.lora.targets={','.join(adapters.targets)}: pipeline stage {stage} has "
                f"layers {chunk[0]} to {chunk[-1]}, none of which has an adapter, and nothing to "
                "train; add targets, add one of them to actor.lora.layers, or use fewer stages "
                "(actor.pipeline_parallel)"
            )


def unmerged_problems(config: Config, device: Device) -> Iterator[str]:
    """Settings that vLLM's adapters (``actor.lora.rollout=unmerged``) do not work with."""
    lora = config.actor.lora
    if not lora.rank or lora.rollout is LoraRollout.merged:
        return
    if lora.rank > VLLM_RANKS[-1]:
        yield (
            f"{_UNMERGED}: vLLM has adapters of ranks up to {VLLM_RANKS[-1]}, and "
            f"actor.lora.rank={lora.rank}; use a lower rank, or merged"
        )
    if device is Device.cuda and config.model.dtype is DType.float32:
        yield (
            f"{_UNMERGED}: vLLM's CUDA kernels for adapters compute in 16 bits only, and "
            "model.dtype=float32; use bfloat16, or merged"
        )


def unmerged_model(config: Config, model: ModelSpec) -> Iterator[str]:
    """The models whose matrices vLLM gives adapters under the names of the files."""
    lora, family = config.actor.lora, model.family.name
    if not lora.rank or lora.rollout is LoraRollout.merged:
        return
    if family not in UNMERGED_FAMILIES:
        yield (
            f"{_UNMERGED}: adapters in engines of {family} were not compared with the actor "
            f"(those of {', '.join(UNMERGED_FAMILIES)} were); use merged"
        )
