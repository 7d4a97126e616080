"""How far a pool's engines are, as the terminal and Prometheus show it."""

from __future__ import annotations

from rlmath.monitor.sampling import SamplingProgress
from rlmath.rollout.pool import RolloutPool


def sampling_progress(pool: RolloutPool) -> SamplingProgress | None:
    """Of the round that is being sampled, or of the last one; ``None`` before the first. From any
    thread."""
    generation = pool.generation
    if generation is None:
        return None
    done = sum(generation.finished)
    return SamplingProgress(
        done=done,
        wanted=done + generation.unfinished,
        tokens=sum(generation.tokens),
        unfinished=tuple(len(held) for held in generation.held),
    )
