"""Log-prob passes over groups that are graded, while others are sampled
(``algorithm.overlap_log_probs``).

The groups that a step admits are taken a fixed number at a time, in the order of admission; those
of them that the filter keeps make one pass, which begins when the last of them is graded. Which
sequences are computed together so depends on the groups alone and not on when they finish: runs
repeat, and a replay makes the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlmath.actor.ahead import PassAhead, StepPass
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.types import Group


@dataclass(frozen=True)
class _Begun:
    """A pass that was begun.

    Attributes:
        problems: Of its groups, in their order.
        made: The pass.
    """

    problems: tuple[str, ...]
    made: PassAhead


class LogProbsAhead:
    """The passes of a step.

    Args:
        begin_pass: Has the ranks make one; see ``ActorGroup.begin_log_probs``.
        groups_per_pass: Admitted groups of a pass.
    """

    def __init__(
        self, begin_pass: Callable[[SampledSequences], PassAhead], groups_per_pass: int
    ) -> None:
        self._begin_pass, self._groups_per_pass = begin_pass, groups_per_pass
        self.begin()

    def begin(self) -> None:
        """Another step begins to be sampled."""
        self._waiting: dict[int, dict[int, Group | None]] = {}
        self._begun: list[_Begun] = []

    def see(self, place: int, group: Group | None) -> None:
        """Take a group that was graded.

        Args:
            place: Among the groups that the step admits, from 0.
            group: ``None``: the filter dropped it.
        """
        number = place // self._groups_per_pass
        found = self._waiting.setdefault(number, {})
        found[place] = group
        if len(found) == self._groups_per_pass:
            self._begin(number)

    def take(self, groups: Sequence[Group]) -> list[StepPass]:
        """All passes of the step, those included that are only begun now.

        Args:
            groups: Of the step. Those that it did not admit, as an earlier step left them, are the
                last pass.

        Returns:
            Passes that have each sample once, in the order of their first samples.
        """
        for number in sorted(self._waiting):
            self._begin(number)
        begun = {id_ for one in self._begun for id_ in one.problems}
        rest = [group for group in groups if group.problem.id not in begun]
        if rest:
            self._begun.append(self._made(rest))
        places: dict[str, range] = {}
        first = 0
        for group in groups:
            places[group.problem.id] = range(first, first + len(group.samples))
            first += len(group.samples)
        found = [
            StepPass(tuple(p for id_ in one.problems for p in places[id_]), one.made)
            for one in self._begun
        ]
        return sorted(found, key=lambda one: one.places)

    def _begin(self, number: int) -> None:
        decided = self._waiting.pop(number)
        kept = [group for _, group in sorted(decided.items()) if group is not None]
        if kept:
            self._begun.append(self._made(kept))

    def _made(self, groups: Sequence[Group]) -> _Begun:
        # What is masked is the update's affair.
        sequences = sampled_sequences(
            groups, truncated=TruncatedRule.keep, mask_duplicates=False, reads_rewards=False
        )
        return _Begun(tuple(group.problem.id for group in groups), self._begin_pass(sequences))
