"""How an actor is laid out, as far as its memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmath.model.fp8_training import Fp8Training, padded_tokens
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout


@dataclass(frozen=True)
class ActorShape:
    # Sizes. With more than one tensor-parallel rank, activations are split along the sequence where
    # matrices are not (actor.sequence_parallel).
    layout: Layout
    recompute_layers: int  # Layers of each stage that keep their input alone.
    max_tokens: int  # Longest micro-batch, over its context ranks.
    layers: str = "transformer_engine"  # transformer_engine or local, see activations.py.
    # The policy's adapters, which alone are trained; None: all weights are.
    lora: Lora | None = None
    # Modules that every layer recomputes in the backward pass; with some, recompute_layers is 0.
    recompute_modules: tuple[str, ...] = ()
    # They are summed over copies while the last micro-batch is computed.
    overlap_gradients: bool = False
    overlap_param_gather: bool = False  # Updated weights are gathered during the next forward pass.
    unmerged: bool = False  # Engines get the adapters alone.
    fp8: Fp8Training | None = None
    max_forward_tokens: int = 0  # Longest micro-batch of a forward-only pass, if above max_tokens.

    @property
    def engine_adapters(self) -> Lora | None:
        """Adapters that engines compute beside the base model; ``None``: they get all weights."""
        return self.lora if self.unmerged else None

    @property
    def in_forward(self) -> ActorShape:
        """The same with the micro-batches of a forward-only pass."""
        return replace(self, max_tokens=max(self.max_forward_tokens, self.max_tokens))

    @property
    def tokens(self) -> int:
        """Tokens of the longest micro-batch on one rank, with the padding that FP8 needs."""
        tokens = -(-self.max_tokens // self.layout.context_parallel)
        return padded_tokens(tokens, self.fp8, self.layout)

    def __str__(self) -> str:
        return f"actor {self.layout}"
