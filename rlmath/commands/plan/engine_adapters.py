"""Memory of adapters in an engine that computes them itself (``actor.lora.rollout=unmerged``)."""

from __future__ import annotations

import dataclasses

from rlmath.commands.plan.engine_memory import engine_weights_bytes
from rlmath.commands.plan.models import adapter_sizes_of_rank
from rlmath.model.lora import MLP_TARGETS, TARGETS, Lora, adapter_parameters, rank_in_vllm
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

_FUSED = (TARGETS[:3], MLP_TARGETS[:2])


def slot_bytes(spec: ModelSpec, tp: int, lora: Lora) -> float:
    """Bytes of vLLM's slot for one adapter on a rank of an engine, in bfloat16.

    It has room for the next rank that vLLM knows, in every layer, and for all matrices of a fused
    one of which any has an adapter.
    """
    targets = set(lora.targets)
    for fused in _FUSED:
        targets |= set(fused) if targets & set(fused) else set()
    held = dataclasses.replace(
        lora,
        rank=rank_in_vllm(lora.rank),
        targets=tuple(name for name in TARGETS if name in targets),
        layers=None,
    )
    return 2 * sum(adapter_sizes_of_rank(spec, Layout(tp), 0, held))


def inbox_bytes(spec: ModelSpec, bucket_bytes: int, lora: Lora) -> float:
    """Bytes on an engine's rank during a weight sync: a copy of every adapter, and one bucket."""
    whole = 2 * adapter_parameters(spec, lora)
    return whole + min(whole, bucket_bytes)


def asleep_bytes(spec: ModelSpec, tp: int, lora: Lora) -> float:
    """Host memory of one rank of an engine that sleeps: vLLM keeps its weights and its slot."""
    return engine_weights_bytes(spec, tp) + slot_bytes(spec, tp, lora)
