"""The result of a step's sampling, until the step takes it and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.rollout.group_state import group_from_state, group_to_state
from rlmath.types import Group, Problem


@dataclass
class Round:
    step: int  # The optimization step, from 1.
    finished: dict[int, Group]  # Graded groups by ordinal, including dropped ones.
    dropped: dict[str, str]  # Reason of the drop by problem.
    metrics: dict[str, float] = field(default_factory=dict)  # Set when the sampling ends.
    engines: Mapping[str, Any] | None = None  # Each engine's work, see Generation.summary.
    # Whether these groups were sampled while the previous step trained, and the step's own sampling
    # is still to come.
    is_open: bool = False

    def to_state(self, kept: Mapping[int, Group]) -> dict[str, Any]:
        """Plain JSON values. ``kept``: groups stored elsewhere in the checkpoint, by ordinal."""
        return {
            "step": self.step,
            "finished": [
                [ordinal, None if ordinal in kept else group_to_state(group)]
                for ordinal, group in sorted(self.finished.items())
            ],
            "dropped": dict(sorted(self.dropped.items())),
            "metrics": dict(self.metrics),
            "engines": self.engines,
            "open": self.is_open,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], kept: Mapping[int, Group], problem: Callable[[str], Problem]
    ) -> Round:
        """Inverse of :meth:`to_state`. ``kept``: as in :meth:`to_state`. ``problem``: returns a
        problem by its id."""
        finished = {
            ordinal: kept[ordinal]
            if saved is None
            else group_from_state(saved, problem(saved["problem_id"]))
            for ordinal, saved in state["finished"]
        }
        return cls(
            state["step"],
            finished,
            dict(state["dropped"]),
            state["metrics"],
            state["engines"],
            state["open"],
        )


@dataclass(frozen=True)
class Sampled:
    # Groups to train on; empty when too few passed the filter, which are then kept for the next
    # step.
    groups: tuple[Group, ...]
    finished: tuple[Group, ...]  # All groups sampled in this step, in the order of their problems.
    metrics: dict[str, float]  # sampling/... and curriculum/....
    shortage: str  # Why there are fewer groups than prompts_per_step; empty if there are not.
    dropped: dict[str, str]  # The filter's reason for each dropped group, by problem.
    # Summary of each engine's work; see Generation.summary.
    engines: Mapping[str, Any] | None = None
