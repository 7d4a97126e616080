"""Calls of the driver to Megatron ranks: waits for results in rank order, and finds the rank that
failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlmath.cluster.failures import describe_failure
from rlmath.cluster.logs import end_of
from rlmath.device.flight_recorder import explain_records
from rlmath.errors import ComponentError, UpdateStopped, UserError

# A rank whose neighbor died raises shortly before the neighbor's death is known.
DEATH_REPORT_S = 2.0
# With up to 31 ranks each answer is handled as it arrives; with more, `ray.wait` waits for a share
# of the remaining ranks, for a limited time.
RANKS_PER_LOOK, LOOK_S = 16, 0.2


class ActorError(ComponentError):
    """A Megatron rank failed. The message names it and shows the end of its log."""


class RankCalls:
    """Waits for calls, one set at a time. ``log_dir``: folder with each rank's output."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self._count = 0
        self._unawaited: tuple[str, list[Any]] = ("", [])
        # The current call, and the ranks that have not answered.
        self.waiting_on: tuple[str, list[int]] = ("", [])

    def progress(self) -> tuple[int, int]:
        """Number of sets of calls so far, and of ranks that have not answered the last one."""
        return self._count, len(self.waiting_on[1])

    def log_path(self, rank: int) -> str:
        return f"{self.log_dir}/actor_{rank}.log"

    def await_later(self, refs: Sequence[Any], method: str) -> None:
        """Register calls whose errors the next :meth:`results` raises."""
        self._unawaited = (method, list(refs))

    def results(
        self, refs: Sequence[Any], method: str, then: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Results in rank order. If several ranks fail, the error is that of the first, because the
        others only wait for it; but a rank whose process ended comes before those that lost it in a
        collective.

        Args:
            refs: Ray's reference to the call of each rank.
            method: Name of the call, for the watchdog.
            then: Called with each rank and its result as it arrives.

        Raises:
            UserError: Raised by a rank; the same for UpdateStopped.
            ActorError: A rank failed in another way.
        """
        earlier, unawaited = self._unawaited
        self._unawaited = ("", [])
        if unawaited:
            self.results(unawaited, earlier)
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        left = list(refs)
        self._count += 1
        while left:
            self.waiting_on = (method, [rank_of[ref] for ref in left])
            # With many ranks, several at once: each `ray.wait` takes time proportional to the
            # ranks.
            several = max(1, len(left) // RANKS_PER_LOOK)
            done, left = ray.wait(left, num_returns=several, timeout=LOOK_S)
            for at, ref in enumerate(done):
                rank = rank_of[ref]
                try:
                    results[rank] = ray.get(ref)
                except RayError as error:
                    others = [*done[at + 1 :], *left]
                    died = _first_dead(others) if isinstance(error, RayTaskError) else None
                    if died is not None:
                        raise self._explain(died[1], rank_of[died[0]]) from error
                    raise self._explain(error, rank) from error
                if then is not None:
                    then(rank, results[rank])
        self.waiting_on = ("", [])
        return results

    def _explain(self, error: RayError, rank: int) -> Exception:
        if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | UpdateStopped):
            return error.cause
        message = f"Megatron rank {rank} failed: {describe_failure(error)}"
        message += end_of(self.log_path(rank)) + explain_records(self.log_dir)
        return ActorError(message, raised=isinstance(error, RayTaskError))


def _first_dead(refs: list[Any]) -> tuple[Any, RayActorError] | None:
    """The first of the pending calls whose process has ended, or cannot be reached."""
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=DEATH_REPORT_S) if refs else ([], [])
    for ref in done:
        try:
            ray.get(ref)
        except RayActorError as error:
            return ref, error
        except RayError:
            continue
    return None
