"""Settings that do not work with linear attention (gated delta nets) or gated attention."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import RoutingReplay
from rlmath.config.rollout import KvCacheDtype, keeps_kv
from rlmath.config.schema import Config, Device, DType
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

# Widths of heads, and of the convolution, that vLLM's CPU kernels have.
CPU_HEAD_DIMS = (64, 128)
CPU_CONV_WIDTH = 4


def linear_engine_problems(config: Config, model: ModelSpec, device: Device) -> Iterator[str]:
    """Settings of engines, and shapes that vLLM's CPU kernels lack."""
    if device is Device.cpu:
        yield from cpu_kernel_problems("model", model, config.model.dtype)
    if model.linear is None:
        return
    if keeps_kv(config.rollout):
        yield (
            "rollout.kv=keep: of linear attention vLLM keeps a state, not keys and values, which "
            "has not been compared across weight syncs; use recompute"
        )
    if config.rollout.kv_cache_dtype is KvCacheDtype.fp8:
        yield (
            "rollout.kv_cache_dtype=fp8: caches of models with linear attention have not been "
            "compared in FP8; use auto"
        )
    if device is Device.cpu and config.actor.routing_replay is RoutingReplay.engine:
        yield (
            "actor.routing_replay=engine: CPU engines keep routes by a token's place in the KV "
            "cache, and with linear attention a token has several; use old_log_probs"
        )


def cpu_kernel_problems(part: str, model: ModelSpec, dtype: DType) -> Iterator[str]:
    """Types and widths that vLLM's CPU kernels of linear attention lack. ``part``: ``model`` or
    ``teacher``, whose settings are named."""
    one = model.linear
    if one is None:
        return
    if dtype is not DType.bfloat16:
        yield (
            f"{part}.dtype={dtype.value}: vLLM's CPU kernels of linear attention "
            "compute in bfloat16 only; use bfloat16"
        )
    if one.key_head_dim != one.value_head_dim or one.key_head_dim not in CPU_HEAD_DIMS:
        yield (
            f"{part}.path: heads of linear attention are {one.key_head_dim} (keys) and "
            f"{one.value_head_dim} (values) wide; vLLM's CPU kernels take equal widths of "
            f"{' or '.join(map(str, CPU_HEAD_DIMS))}"
        )
    if one.conv_width != CPU_CONV_WIDTH:
        yield (
            f"{part}.path: linear_conv_kernel_dim={one.conv_width}: vLLM's CPU kernels take only "
            f"{CPU_CONV_WIDTH}"
        )


def linear_layout_problems(model: ModelSpec, ranks: int, contexts: int) -> Iterator[str]:
    """Context parallelism, and more tensor ranks than key-value heads with gates."""
    if model.linear is not None and contexts > 1:
        yield (
            f"actor.context_parallel={contexts}: the state of linear attention passes through a "
            "sequence's tokens in order, but a context rank has two separate pieces of each "
            "sequence; set it to 1"
        )
    if model.family.gated_attention and ranks > model.kv_heads:
        yield (
            f"actor.tensor_parallel={ranks}: Megatron 0.16.1 has no gated attention with more "
            f"tensor ranks than key-value heads; use at most {model.kv_heads}"
        )


def linear_attention_problems(config: Config, model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Layouts, and FP8, that do not work."""
    yield from linear_layout_problems(model, layout.tensor_parallel, layout.context_parallel)
    if model.linear is not None and config.actor.fp8.value != "none":
        yield (
            f"actor.fp8={config.actor.fp8.value}: linear attention takes the decay of its state "
            "from the matrix that its queries come from, and has not been compared with that in "
            "FP8; use actor.fp8=none"
        )
