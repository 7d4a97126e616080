"""Settings of ``actor.lora``: low-rank adapters, which are trained in place of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlmath.model.lora import Lora, default_targets, model_targets
from rlmath.model.spec import ModelSpec
from rlmath.utils.setting import OnlyWith, setting

_ON = OnlyWith("rank", words="1 or more")


LoraRollout = StrEnum("LoraRollout", ["merged", "unmerged"])


@dataclass
class LoraConfig:
    rank: int = setting(
        0,
        "Rank of low-rank adapters (LoRA) on the policy's linear layers, which alone are trained. "
        "0: off, all weights are trained.",
        least=0,
    )
    alpha: float = setting(
        32.0, "The adapters' product is scaled by alpha / rank.", above=0, only_with=_ON
    )
    targets: list[str] | None = setting(
        None,
        "Which matrices of a layer have an adapter: some of q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj, the last three also of every expert. DeepSeek-V3 has "
        "q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj in place of the first three. Linear "
        "attention has out_proj, and in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5) or "
        "in_proj_qkvz and in_proj_ba (Qwen3-Next). null: all of them, or in an MoE those of "
        "attention.",
        only_with=_ON,
    )
    layers: list[int] | None = setting(
        None,
        "Layers with adapters, by their numbers from 0, such as [14,15]; null: all.",
        only_with=_ON,
    )
    init_from: str | None = setting(
        None,
        "Folder in PEFT's format of the adapters to begin with, of this rank, alpha, targets and "
        "layers; null: new ones, with which the model is the base model.",
        only_with=_ON,
    )
    rollout: LoraRollout = setting(
        LoraRollout.merged,
        "How engines get the adapters. merged: as whole weights with the adapters in them, at each "
        "weight sync; unmerged: the adapters alone, which vLLM computes beside the base model that "
        "it has read from model.path.",
        only_with=_ON,
    )


def adapters_of(lora: LoraConfig, spec: ModelSpec, seed: int) -> Lora | None:
    if not lora.rank:
        return None
    chosen = default_targets(spec) if lora.targets is None else lora.targets
    return Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(target for target in model_targets(spec) if target in chosen),
        layers=None if lora.layers is None else tuple(sorted(set(lora.layers))),
        init_from=None if lora.init_from is None else str(Path(lora.init_from).absolute()),
        seed=seed,
    )
