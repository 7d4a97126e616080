"""Settings of ``model``: the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from rlmath.utils.setting import setting


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class ModelConfig:
    path: str = setting(
        MISSING,
        "Hugging Face folder with config.json, tokenizer and safetensors, or a model of the hub, "
        'such as Qwen/Qwen3-8B, which is downloaded into its cache. "tiny" creates a random model '
        "with 0.66 million parameters in run_dir.",
        common=True,
    )
    dtype: DType = setting(
        DType.bfloat16, "Data type of weights and activations in the actor and the engines."
    )
    architecture: str | None = setting(
        None, "Expected architecture, such as Qwen2ForCausalLM; null accepts what config.json says."
    )
