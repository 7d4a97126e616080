"""What needs a step's token ids or log-probs on the driver, which ``rollout.arrays=engines`` leaves
where they are."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import RoutingReplay
from rlmath.config.rollout import ArraysAt
from rlmath.config.schema import Config


def array_problems(config: Config) -> Iterator[str]:
    """A message for each setting that would bring a step's arrays to the driver."""
    if config.rollout.arrays is ArraysAt.engines:
        yield from (
            f"rollout.arrays=engines: {one}, or arrays=driver" for one in _of_arrays(config)
        )


def _of_arrays(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.distill_coef > 0:
        yield (
            f"with algorithm.distill_coef={algorithm.distill_coef:g} the driver sends token ids to "
            "a teacher; use 0"
        )
    if config.actor.routing_replay is RoutingReplay.engine:
        yield (
            "actor.routing_replay=engine has an MoE's routes on the driver; use "
            "routing_replay=old_log_probs or none"
        )
    for index, item in enumerate(config.reward.items):
        if item.params.get("unit") == "token":
            yield (
                f"reward.items[{index}].params.unit=token: {item.name} reads token ids; use "
                "unit=word"
            )
