"""Constants that an engine computes with: epsilons of norms and frequencies of rotary
embeddings.

An engine that reads one of them otherwise than the actor computes another function with equal
weights. In bfloat16 another epsilon hides below the rounding noise that the gate allows, so the
engines are asked for these numbers, exactly, when their weights are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from rlmath.actor.rotary import rope_inverse_frequencies
from rlmath.engines.protocol import Engine
from rlmath.errors import WeightsError
from rlmath.model.rope import Rope
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.training.checks.base import AfterSync, Metrics, StepCheck

# Relative tolerances of a cosine that vLLM keeps in bfloat16, and of one in float32, whose angle is
# off by 1e-7.
TOLERANCES = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-4}


class EngineConstants(StepCheck):
    """Engines compute with the actor's constants."""

    def after_sync(self, now: AfterSync) -> Metrics:
        pool = now.run.sampling.pool
        if now.compared_all:
            check_constants(pool, read_model_spec(now.run.config.model.path))
        return {}


def check_constants(pool: RolloutPool, spec: ModelSpec) -> None:
    """Ask every engine for its numbers. ``pool``: the engines. ``spec``: the model as the actor
    reads it. Raises WeightsError: an engine has others."""
    for index, workers in enumerate(pool.ask(Engine.constants)):
        for found in workers:
            problem = wrong_constant(found, spec)
            if problem:
                raise WeightsError(
                    f"engine {index} {problem}, so it computes a different model even with equal "
                    "weights. Compare config.json with what vLLM reads from it"
                )


def wrong_constant(found: dict[str, Any], spec: ModelSpec) -> str | None:
    """First constant that differs in a worker; ``None``: none does. ``found``: constants of a
    worker; see ``Engine.constants``. ``spec``: the model as the actor reads it."""
    for epsilon in found["norm_eps"]:
        if abs(epsilon - spec.norm_eps) > 1e-6 * spec.norm_eps:
            return f"has an RMS norm with epsilon {epsilon:g}, and the actor {spec.norm_eps:g}"
    wanted = [one for one in (spec.rope, spec.window_rope) if one is not None]
    for rope in wanted:
        # A model with neither tables nor frequencies has them in its kernels.
        if found["ropes"] and not any(_equal(held, rope, spec) for held in found["ropes"]):
            return (
                f"has different rotary frequencies than the actor (rope {rope.kind}, "
                f"theta {rope.theta:g}, {spec.rotary_dim} of {spec.head_dim} elements of a head)"
            )
    return None


def _equal(held: dict[str, Any], rope: Rope, spec: ModelSpec) -> bool:
    """Whether a rotary embedding of an engine is the actor's, to the rounding of its type."""
    inverse, factor = rope_inverse_frequencies(spec, rope)
    angles = held["position"] * inverse.double()
    wanted = torch.cat([angles.cos(), angles.sin()]) * factor
    found = torch.tensor(held["values"], dtype=torch.float64)
    if found.shape != wanted.shape:
        return False
    tolerance = TOLERANCES.get(held["dtype"], 1e-2) * factor
    return float((found - wanted).abs().max()) <= tolerance
