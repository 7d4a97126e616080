"""The precision contract: choices that affect log-probs most, shared by actor and engines.

Two sides that compute a model in different types do not have the same policy. In addition to
``model.dtype``, both follow these rules:

- the product with the output matrix is computed in ``precision.lm_head_dtype``;
- an MoE router's product is computed in ``precision.router_dtype``, its softmax in float32;
- logits are divided by the temperature in float32, and the softmax is in float32;
- log-probs are those of the sampled distribution, after temperature.

The actor implements the last two in ``rlmath/actor/logprobs.py``, vLLM in its sampler, with
``LOGPROBS_MODE``. An engine that violates the contract does not start
(``rlmath/engines/patches/engine_precision.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# vLLM's mode for log-probs after temperature instead of the model's raw logits.
LOGPROBS_MODE = "processed_logprobs"

# How many times a model's own rounding noise the mean difference of two correct implementations may
# be. Healthy engines were at most 1.2 times as far away, on an H100 0.8 (docs/records/weights.md).
NOISE_FACTOR = 2.0


def log_prob_limit(in_float32: bool, moe: bool, noise_excess: float = 0.0) -> float:
    """Maximum mean of exp|difference| of log-probs between two correct implementations.

    Args:
        in_float32: Both compute in float32 instead of bfloat16.
        moe: The model is an MoE, where bfloat16 rounding can route a token to another expert.
        noise_excess: Mean of exp|difference|, minus 1, of this model with every activation rounded
            otherwise. It depends on model and text: 0.0002 to 0.11 in bfloat16. Infinity and NaN
            raise no limit.
    """
    if in_float32:
        return 1.0001
    least = 1.05 if moe else 1.02
    return max(least, 1 + NOISE_FACTOR * noise_excess) if math.isfinite(noise_excess) else least


@dataclass(frozen=True)
class Precision:
    """Types of the products that decide log-probs; ``model`` is the model's own type."""

    lm_head_dtype: str = "model"  # model or float32.
    router_dtype: str = "float32"  # model or float32; no effect for a dense model.
    # Kernels whose result for a sequence does not depend on the rest of its batch, and a
    # deterministic backward pass in the actor. CUDA only.
    batch_invariant: bool = False
