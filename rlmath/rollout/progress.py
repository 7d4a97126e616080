"""Progress of a pool's engines, for the terminal and Prometheus."""

from __future__ import annotations

from rlmath.monitor.sampling import SamplingProgress
from rlmath.rollout.pool import RolloutPool


def sampling_progress(pool: RolloutPool) -> SamplingProgress | None:
    """Progress of the current or last round; ``None`` before the first. Thread-safe."""
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
