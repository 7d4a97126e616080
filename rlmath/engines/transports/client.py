"""Calls from a trainer rank to the engines: rank 0 calls all, or with ``ipc`` each rank its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.errors import UserError
from rlmath.weights.expert_shares import ExpertShare


class EngineClient:
    """vLLM's ``VLLMWeightSyncClient`` for some of the pool's engines; each call goes to all of
    them. ``engines``: handles of ``RolloutEngine`` actors. ``ranks_per_engine``: tensor-parallel
    ranks of each."""

    def __init__(self, engines: Sequence[Any], ranks_per_engine: int) -> None:
        self._engines = list(engines)
        self._ranks_per_engine = ranks_per_engine
        # Version of the weights about to be sent; set before each update, because the protocol's
        # calls do not carry it.
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect each engine to the trainer.

        ``nccl`` numbers the workers of one engine from ``rank_offset``; those of the next engine
        follow.
        """
        infos = [dict(init_info) for _ in self._engines]
        if "rank_offset" in init_info:
            for number, info in enumerate(infos):
                info["rank_offset"] += number * self._ranks_per_engine
        self._all("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Load one bucket in all engines; returns when all have it."""
        self._all("update_weights", [update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Activate the new weights as ``version`` and reset the caches."""
        self._all("finish_weight_update", [self.version] * len(self._engines))

    def refused_shares(self, shares: Sequence[ExpertShare]) -> list[str]:
        """Errors of workers whose experts differ from those they would be sent. ``shares``: the
        share that each worker of an engine would be sent."""
        found = self._all("call_workers", [worker_experts] * len(self._engines))
        return [
            f"worker {worker} of engine {engine} keeps {own} of the experts, and the actor would "
            f"send it {share}"
            for engine, workers in enumerate(found)
            for worker, (own, share) in enumerate(zip(workers, shares, strict=True))
            if own != share
        ]

    def _all(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        import ray

        if arguments is None:
            calls = [getattr(engine, method).remote() for engine in self._engines]
        else:
            calls = [
                getattr(engine, method).remote(argument)
                for engine, argument in zip(self._engines, arguments, strict=True)
            ]
        try:
            found: list[Any] = ray.get(calls)
        except ray.exceptions.RayTaskError as error:
            # Raise the user's error itself, without Ray's wrapping.
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        return found


def worker_experts(worker: Any) -> ExpertShare | None:
    """The current share of the experts of a vLLM worker; runs there."""
    from rlmath.engines.transports.engine_parts import expert_share

    return expert_share(worker.model_runner.get_model())
