"""Apply and check vLLM's side of the precision contract (``rlmath/model/precision.py``)."""

from __future__ import annotations

import os
from typing import Any

from rlmath.model.precision import LOGPROBS_MODE, Precision

# Tells vLLM's processes, before they build the model, what ``precision.router_dtype`` is.
ROUTER_VARIABLE = "RLMATH_ROUTER_DTYPE"
# Switches vLLM's batch-invariant kernels on. It reads it when its workers start.
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"
# vLLM's class of routers, whose module a dense model need not import.
ROUTER = "GateLinear"


def engine_arguments(precision: Precision) -> dict[str, Any]:
    """Arguments of vLLM's engine that keep the contract."""
    arguments: dict[str, Any] = {"logprobs_mode": LOGPROBS_MODE}
    if precision.lm_head_dtype != "model":
        arguments["hf_overrides"] = {"head_dtype": precision.lm_head_dtype}
    return arguments


def register_router() -> None:
    """Have vLLM build routers that multiply in float32, if this process has to.

    Qwen3-MoE's own router multiplies in the model's type, and has no setting for it. vLLM lets
    layers be replaced by name.
    """
    if os.environ.get(ROUTER_VARIABLE) != "float32":
        return
    import torch
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    if ROUTER in op_registry_oot:
        return

    @PluggableLayer.register_oot(name=ROUTER)
    class Float32GateLinear(GateLinear):
        """Accumulates in float32 where a kernel can, else holds its weight in float32."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"out_dtype": torch.float32, "force_fp32_compute": True}
            super().__init__(*arguments, **options)


def worker_precision(worker: Any) -> dict[str, str]:
    """Runs in a vLLM worker: the types that its model computes with, and whether its kernels are
    the batch-invariant ones."""
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    model, config = worker.model_runner.get_model(), worker.model_runner.model_config
    found = {
        "logprobs_mode": str(config.logprobs_mode),
        "dtype": _name(config.dtype),
        "batch_invariant": _on(batch_invariant._batch_invariant_MODE),
    }
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            found["lm_head_dtype"] = _name(module.head_dtype or config.dtype)
        elif any(one.__name__ == ROUTER for one in type(module).__mro__):
            found["router_dtype"] = _name(module.out_dtype or config.dtype)
    return found


def check_workers(workers: list[dict[str, str]], precision: Precision, dtype: str) -> None:
    """Compare the types that vLLM's workers use with the contract. ``workers``: from
    ``worker_precision``. ``dtype``: ``model.dtype``. Raises RuntimeError: a worker differs. vLLM
    falls back to another type if a platform lacks one, and only its log says so."""
    wanted = {
        "logprobs_mode": LOGPROBS_MODE,
        "dtype": dtype,
        "lm_head_dtype": _resolve(precision.lm_head_dtype, dtype),
        "router_dtype": _resolve(precision.router_dtype, dtype),
        "batch_invariant": _on(precision.batch_invariant),
    }
    for rank, found in enumerate(workers):
        for key, value in found.items():
            if value != wanted[key]:
                setting = "model.dtype" if key == "dtype" else f"precision.{key}"
                raise RuntimeError(
                    f"{setting}: the actor computes with {wanted[key]}, but vLLM's rank {rank} "
                    f"with {value}; their log-probs would differ"
                )


def _resolve(setting: str, dtype: str) -> str:
    return dtype if setting == "model" else setting


def _on(mode: bool) -> str:
    return "on" if mode else "off"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
