"""Settings that cannot train models with linear attention (gated delta nets) or gated attention."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.schema import Config
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec


def linear_attention_problems(config: Config, model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Context parallelism, FP8, and more tensor ranks than key-value heads with gates."""
    contexts, ranks = layout.context_parallel, layout.tensor_parallel
    if model.linear is not None and contexts > 1:
        yield (
            f"actor.context_parallel={contexts}: the state of linear attention passes through a "
            "sequence's tokens in order, but a context rank has two separate pieces of each "
            "sequence; set it to 1"
        )
    if model.linear is not None and config.actor.fp8.value != "none":
        yield (
            f"actor.fp8={config.actor.fp8.value}: linear attention multiplies its state, token by "
            "token, by the exponential of rows of the matrix that its queries come from; an error "
            "of 8 bits would grow with the sequence; use actor.fp8=none"
        )
    if model.family.gated_attention and ranks > model.kv_heads:
        yield (
            f"actor.tensor_parallel={ranks}: Megatron 0.16.1 has no gated attention with more "
            f"tensor ranks than key-value heads; use at most {model.kv_heads}"
        )
