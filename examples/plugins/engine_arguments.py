"""Engine arguments: the attention backend of vLLM on GPUs, and the model's name in its log.

rlmath train experiment=quickstart rollout.engine_options.name=mine \\
    rollout.engine_arguments=examples/plugins/engine_arguments.py:arguments
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.config.engine_arguments import ENGINE_ARGUMENTS
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class EngineOptions(Options):
    name: str = setting("policy", "Name of the model in vLLM's log.")
    attention: str | None = setting(None, "vLLM's attention backend; null: vLLM's choice.")


@ENGINE_ARGUMENTS.register("named", EngineOptions)
def arguments(device: str, options: EngineOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"served_model_name": options.name}
    if device == "cuda" and options.attention is not None:
        found["attention_config"] = {"backend": options.attention}
    return found
