"""Layers and kernels that the actor can have: Transformer Engine's, and batch-invariant ones."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.checks.machine import Machine
from rlmath.config.schema import Config, Device, DType, Layers
from rlmath.model.spec import ModelSpec
from rlmath.utils import transformer_engine as te_install

_KEY = "precision.batch_invariant=true"
# A sum of two numbers is the same in either order; collectives add more of them in an order that
# depends on where a token stands in its row.
MOST_BATCH_INVARIANT_TENSOR_RANKS = 2


def layers(config: Config, machine: Machine, device: Device) -> Iterator[str]:
    """Transformer Engine where the actor's layers are its own."""
    # Other nodes' machines are looked at by their ranks.
    here = config.cluster.ray_address is None and machine.has_cuda and device is Device.cuda
    local = config.actor.layers is Layers.local
    if here and not local and machine.transformer_engine is not None:
        yield te_install.refusal(machine.transformer_engine)


def context_attention(config: Config, device: Device, command: str) -> Iterator[str]:
    """Attention on a GPU in float32, which flash attention does not take.

    Of Transformer Engine's backends flash and fused attention take 16 bits alone, and the unfused
    one no context parallelism (``get_attention_backend`` in transformer_engine 2.11,
    dot_product_attention/utils.py). The local layers use torch's flash attention for packed
    sequences (``torch.nn.attention.varlen``), and with context parallelism another kernel.
    """
    actor = config.actor
    in_float32 = device is Device.cuda and config.model.dtype is DType.float32
    if command == "evaluate" or not in_float32:
        return
    local, alone = actor.layers is Layers.local, actor.context_parallel == 1
    if local and alone:
        yield (
            "model.dtype=float32: torch's attention for packed sequences, which "
            "actor.layers=local uses, supports only 16 bits on CUDA; use bfloat16, or "
            "actor.layers=auto"
        )
    if not local and not alone:
        yield (
            "model.dtype=float32: Transformer Engine has no attention for it with "
            f"actor.context_parallel={actor.context_parallel}; use bfloat16, "
            "actor.context_parallel=1, or actor.layers=local"
        )


def batch_invariance(
    config: Config, machine: Machine, device: Device, command: str
) -> Iterator[str]:
    """Settings that Megatron's batch-invariant kernels do not cover."""
    if not config.precision.batch_invariant or device is Device.cpu or command == "evaluate":
        return
    actor = config.actor
    if config.cluster.ray_address is None and machine.has_cuda and not machine.flash_attention:
        yield (
            f"{_KEY}: of Transformer Engine's attention backends, only flash attention is batch "
            "invariant, and neither flash-attn nor flash-attn-3 is installed; install "
            "flash-attn==2.8.3 (hours of compilation), or set it to false"
        )
    if config.model.dtype is DType.float32:
        yield f"{_KEY}: flash attention has no kernel for model.dtype=float32; use bfloat16"
    if actor.context_parallel > 1:
        yield (
            f"{_KEY}: with actor.context_parallel={actor.context_parallel} attention adds up the "
            "ranks' parts in its own order; set actor.context_parallel=1"
        )
    if actor.tensor_parallel > MOST_BATCH_INVARIANT_TENSOR_RANKS:
        yield (
            f"{_KEY}: actor.tensor_parallel={actor.tensor_parallel} ranks are summed in an order "
            "that depends on a token's place in its row; use at most "
            f"{MOST_BATCH_INVARIANT_TENSOR_RANKS}, whose sum has one order"
        )


def batch_invariant_model(config: Config, model: ModelSpec) -> Iterator[str]:
    """Models all of whose products have a batch-invariant kernel."""
    if config.precision.batch_invariant and model.experts:
        yield (
            f"{_KEY}: the grouped products of {model.experts} experts have no batch-invariant "
            "kernel in Megatron; set it to false, or use a dense model"
        )
    if config.precision.batch_invariant and model.linear is not None:
        yield (
            f"{_KEY}: Megatron has no batch-invariant kernels of linear attention; set it to false"
        )
