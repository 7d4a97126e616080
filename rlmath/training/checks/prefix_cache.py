"""After a weight sync no engine keeps cached prompts of the old weights."""

from __future__ import annotations

from rlmath.engines.protocol import Engine
from rlmath.errors import WeightsError
from rlmath.rollout.pool import RolloutPool
from rlmath.training.checks.base import AfterSync, Metrics, StepCheck


class PrefixCache(StepCheck):
    """Engines keep no blocks of old weights, unless ``rollout.kv=keep`` asks for it."""

    def after_sync(self, now: AfterSync) -> Metrics:
        pool = now.run.sampling.pool
        if pool.spec.prefix_caching and not pool.spec.keeps_kv:
            check_prefix_cache(pool)
        return {}


def check_prefix_cache(pool: RolloutPool) -> None:
    """Ask every engine for the blocks of its prefix cache. Raises WeightsError: an engine has
    some."""
    for index, left in enumerate(pool.ask(Engine.cached_blocks)):
        if left:
            raise WeightsError(
                f"engine {index} still has {left} blocks in its prefix cache after the update to "
                f"weights version {pool.weights_version}: prompts would continue from keys and "
                "values of the old weights. rollout.prefix_caching=false runs without the cache"
            )
