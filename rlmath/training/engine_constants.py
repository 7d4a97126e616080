"""What an engine computes with besides its weights: epsilons of norms, frequencies of rotary
embeddings, and what its prefix cache keeps.

An engine that reads one of them otherwise than the actor computes another function with equal
weights. In bfloat16 another epsilon hides below the rounding noise that the gate allows, so the
engines are asked for these numbers, exactly, when their weights are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from rlmath.actor.rotary import rope_inverse_frequencies
from rlmath.errors import WeightsError
from rlmath.model.spec import ModelSpec
from rlmath.rollout.engine_workers import cached_blocks, inverse_frequencies
from rlmath.rollout.pool import RolloutPool

# Of a cosine that vLLM keeps in bfloat16, and of one in float32.
TOLERANCES = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5}
# Where the rotary embedding is looked at: so far that another theta shows in bfloat16.
POSITION = 16
# yarn's scale is in vLLM's cosines, and elsewhere in the actor.
_ROPES = ("default", "linear", "llama3")


def worker_constants(worker: Any) -> dict[str, Any]:
    """Runs in a vLLM worker: epsilons of its norms; type and values at ``POSITION`` of its rotary
    embedding, cosines before sines."""
    epsilons: set[float] = set()
    rope: dict[str, Any] = {}
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "variance_epsilon"):
            epsilons.add(float(module.variance_epsilon))
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            rope = {
                "rope_dtype": str(cache.dtype).removeprefix("torch."),
                "rope": cache[POSITION].double().tolist(),
            }
        for _, inverse in inverse_frequencies(module):
            angles = POSITION * inverse.double()
            rope = {
                "rope_dtype": str(inverse.dtype).removeprefix("torch."),
                "rope": torch.cat([angles.cos(), angles.sin()])
                .mul(float(getattr(module, "attention_scaling", 1.0)))
                .tolist(),
            }
    return {"norm_eps": sorted(epsilons), **rope}


def check_constants(pool: RolloutPool, spec: ModelSpec) -> None:
    """Ask every engine for its numbers.

    Args:
        pool: The engines.
        spec: The model as the actor reads it.

    Raises:
        WeightsError: An engine has others.
    """
    for index, workers in enumerate(pool.call_workers(worker_constants)):
        for found in workers:
            problem = wrong_constant(found, spec)
            if problem:
                raise WeightsError(
                    f"engine {index} {problem}: with equal weights it computes another model than "
                    "the actor. Compare config.json with what vLLM reads of it"
                )


def check_prefix_cache(pool: RolloutPool) -> None:
    """After a weight sync no engine keeps what the old weights have made of prompts.

    Raises:
        WeightsError: An engine does.
    """
    for index, left in enumerate(pool.call_engines(cached_blocks)):
        if left:
            raise WeightsError(
                f"engine {index} keeps {left} blocks of the prefix cache after the update to "
                f"weights version {pool.weights_version}: prompts would continue from keys and "
                "values of the old weights. rollout.prefix_caching=false runs without the cache"
            )


def wrong_constant(found: dict[str, Any], spec: ModelSpec) -> str | None:
    """What a worker computes otherwise; ``None``: nothing.

    Args:
        found: From :func:`worker_constants`.
        spec: The model as the actor reads it.
    """
    for epsilon in found["norm_eps"]:
        if abs(epsilon - spec.norm_eps) > 1e-6 * spec.norm_eps:
            return f"has an RMS norm with epsilon {epsilon:g}, and the actor {spec.norm_eps:g}"
    if "rope" not in found or spec.rope.kind not in _ROPES or spec.window_rope is not None:
        return None
    inverse, factor = rope_inverse_frequencies(spec)
    angles = POSITION * inverse.double()
    wanted = torch.cat([angles.cos(), angles.sin()]) * factor
    held = torch.tensor(found["rope"], dtype=torch.float64)
    tolerance = TOLERANCES.get(found["rope_dtype"], 1e-2)
    if held.shape == wanted.shape and float((held - wanted).abs().max()) <= tolerance:
        return None
    return (
        f"has rotary embeddings of other frequencies than the actor (rope {spec.rope.kind}, theta "
        f"{spec.rope.theta:g}, {spec.rotary_dim} of {spec.head_dim} elements of a head)"
    )
