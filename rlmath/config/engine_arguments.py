"""Further arguments of vLLM's engines, from a user's code.

``rollout.engine_arguments`` names a function. The driver calls it once, with ``cpu`` or ``cuda``
and its options; engines get what it returns, beside what rlmath gives them itself.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmath.errors import ConfigError
from rlmath.plugins import NoTraits, Registry
from rlmath.utils.close_names import did_you_mean

# (device, options) -> fields of vLLM's EngineArgs
ENGINE_ARGUMENTS: Registry[Callable[[str, Any], dict[str, Any]], NoTraits] = Registry(
    "rollout.engine_arguments", NoTraits
)
# Arguments that rlmath gives, by the setting that decides, or the reason why they are fixed.
RESERVED = {
    "model": "model.path",
    "load_format": "",
    "dtype": "model.dtype",
    "quantization": "rollout.quantization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "distributed_executor_backend": "",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_running_sequences",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enable_sleep_mode": "cluster.placement",
    "weight_transfer_config": "weights.transport",
    "disable_log_stats": "",
    "seed": "runner.seed",
    "logprobs_mode": "",
    "hf_overrides": "precision",
    "enable_lora": "actor.lora.rollout",
    "max_loras": "actor.lora.rollout",
    "max_cpu_loras": "actor.lora.rollout",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
    "enable_chunked_prefill": "",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "enforce_eager": "rollout.enforce_eager",
    "kv_cache_memory_bytes": "rollout.cpu_kv_cache_gib",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "async_scheduling": "rollout.async_scheduling",
    "scheduler_cls": "",
    "ir_op_priority": "",
    "device_ids": "",
    "enable_return_routed_experts": "actor.routing_replay",
    "mamba_ssm_cache_dtype": "",
}


@functools.cache
def known_arguments() -> frozenset[str]:
    """Fields of vLLM's ``EngineArgs``, read from its source, as its import takes seconds; none
    where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    file = Path(spec.origin).parent / "engine" / "arg_utils.py"
    (found,) = (
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return frozenset(one.id for one in fields if isinstance(one, ast.Name))


def further_arguments(name: str | None, device: str, options: Any) -> dict[str, Any]:
    """Return value of the function called ``name``; ``None``: nothing.

    Raises:
        ConfigError: It returns no mapping, or an argument that rlmath gives itself or vLLM does not
            have.
    """
    if name is None:
        return {}
    found = ENGINE_ARGUMENTS.get(name)(device, options)
    if not isinstance(found, dict):
        raise ConfigError(
            f"rollout.engine_arguments={name}: returned a {type(found).__name__}, not a dict"
        )
    problems = []
    # On CUDA its size is measured, which several runs on one GPU would do at each other's cost.
    free = {"kv_cache_memory_bytes"} if device == "cuda" else set()
    for key in found.keys() & RESERVED.keys() - free:
        instead = (
            f"use {RESERVED[key]}" if RESERVED[key] else "the contract with the actor needs it"
        )
        problems.append(f"rollout.engine_arguments={name}: rlmath gives {key} itself; {instead}")
    known = known_arguments()
    for key in found.keys() - known if known else ():
        close = did_you_mean(key, known)
        problems.append(f"rollout.engine_arguments={name}: vLLM has no argument {key}{close}")
    if problems:
        raise ConfigError.of(sorted(problems))
    return found
