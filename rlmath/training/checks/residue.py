"""Memory that actor and engines keep while the other has the GPU: logged, and held to a limit."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.device.residue import Residue
from rlmath.errors import UserError
from rlmath.training.checks.base import AfterSync, Metrics, StepCheck

GIB = 2**30
OVERLAPPED = "memory/wake_overlapped"
ACTOR, HOST, OTHERS = "memory/actor_residue_gib", "memory/host_gib", "memory/engine_residue_gib"


class LeftoverMemory(StepCheck):
    """Memory that actor and engines keep on a shared GPU must not grow over the steps."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}

    def after_sync(self, now: AfterSync) -> Metrics:
        growth_gib = now.run.config.actor.offload_growth_gib
        return self.compare(now.beside_engines, now.asleep, now.wake_overlapped, growth_gib)

    def compare(
        self,
        beside_engines: Sequence[Residue],
        asleep: Sequence[Residue],
        overlapped: bool,
        growth_gib: float,
    ) -> Metrics:
        """The metrics of a step, of the rank that has most. Raises UserError: a rank, or what
        shares its GPU, keeps more than the limit above the first step's.

        Args:
            beside_engines: Memory of each rank when all was offloaded; empty: nothing is.
            asleep: Memory of each rank while the engines slept.
            overlapped: Engines woke while ranks copied; see ``rlmath.rollout.wake_room``.
            growth_gib: ``actor.offload_growth_gib``.
        """
        if not beside_engines:
            return {}
        metrics = {
            ACTOR: max(one.device_bytes for one in beside_engines) / GIB,
            HOST: max(one.host_bytes for one in beside_engines) / GIB,
            OVERLAPPED: float(overlapped),
        }
        others = [one.others_bytes for one in asleep if one.others_bytes is not None]
        if others:
            metrics[OTHERS] = max(others) / GIB
        for name, what in (
            (ACTOR, "a Megatron rank keeps on its GPU after offloading"),
            (OTHERS, "sleeping engines (and CUDA itself) keep on a rank's GPU"),
        ):
            if name not in metrics:
                continue
            now, first = metrics[name], self._first.setdefault(name, metrics[name])
            if now - first > growth_gib:
                raise UserError(
                    f"{what}: {now:.2f} GiB, which is {now - first:.2f} above the "
                    f"{first:.2f} GiB of the first step; the limit is actor.offload_growth_gib="
                    f"{growth_gib:g}. Memory is not released. runner.resume=auto "
                    "resumes from the last checkpoint in new processes"
                )
        return metrics
