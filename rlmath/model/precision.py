"""The precision contract: what decides log-probs most, said once and kept by actor and engines.

Two sides that compute the same model in other types do not sample and train the same policy. What
both keep, besides ``model.dtype``:

- the product with the output matrix is taken in ``precision.lm_head_dtype``;
- an MoE router's product is taken in ``precision.router_dtype``, its softmax
  in float32;
- logits are divided by the temperature in float32, and the softmax is in float32;
- log-probs are those of the distribution that was sampled from, after temperature.

The actor does the last two in ``rlmath/actor/logprobs.py``, vLLM in its sampler, with
``LOGPROBS_MODE``. An engine that does not keep the contract does not start
(``rlmath/vllm_plugin/engine_precision.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

# vLLM's word for log-probs after temperature, rather than of the model's own logits.
LOGPROBS_MODE = "processed_logprobs"


def log_prob_limit(in_float32: bool, moe: bool) -> float:
    """Largest mean of exp|difference| of log-probs between two right implementations.

    Args:
        in_float32: Both compute in float32, not in bfloat16.
        moe: Whether the model is one: a rounding in bfloat16 can send a token to another expert.
    """
    if in_float32:
        return 1.0001
    return 1.05 if moe else 1.02


@dataclass(frozen=True)
class Precision:
    """Types of the products that decide log-probs; ``model`` stands for the model's own type.

    Attributes:
        lm_head_dtype: ``model`` or ``float32``.
        router_dtype: ``model`` or ``float32``; says nothing for a dense model.
        batch_invariant: Kernels whose result for a sequence does not depend on what shares its
            batch, and a deterministic backward pass in the actor. CUDA only.
    """

    lm_head_dtype: str = "model"
    router_dtype: str = "float32"
    batch_invariant: bool = False
