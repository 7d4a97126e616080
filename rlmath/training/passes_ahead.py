"""Passes over groups that are graded, while others are sampled (``algorithm.overlap_log_probs``,
``algorithm.overlap_update``).

The groups that a step admits are taken a fixed number at a time, in the order of admission; those
of them that the filter keeps make one pass, which begins when the last of them is graded. Which
sequences are computed together so depends on the groups alone and not on when they finish: runs
repeat, and a replay makes the same passes.

The ranks have few passes at a time, and the others wait here: what else is asked of the ranks, a
save of a run that is interrupted for instance, does not wait for those that have not begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlmath.actor.ahead import PassAhead, StepPass
from rlmath.types import Group

# Has the ranks make a pass over groups; takes whether it is the first of its step.
BeginPass = Callable[[Sequence[Group], bool], PassAhead]

# Passes that the ranks have at once: while they make one, the next is with them already.
MOST_BEGUN = 2
# How often somebody has to look whether the ranks are done with one, in seconds.
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class _Begun:
    """A pass that was begun.

    Attributes:
        problems: Of its groups, in their order.
        made: The pass.
    """

    problems: tuple[str, ...]
    made: PassAhead


class PassesAhead:
    """The passes of a step.

    Args:
        begin_pass: Has the ranks make one.
        groups_per_pass: Admitted groups of a pass.
        in_order: A pass waits for those before it to begin, as gradients have to be added in an
            order that depends on no clock.
        is_done: Whether the ranks are done with a pass, or failed in it; never waits.
    """

    def __init__(
        self,
        begin_pass: BeginPass,
        groups_per_pass: int,
        *,
        in_order: bool = False,
        is_done: Callable[[PassAhead], bool] = lambda _: True,
    ) -> None:
        self._begin_pass, self._groups_per_pass = begin_pass, groups_per_pass
        self._in_order, self._is_done = in_order, is_done
        self.begin()

    def begin(self) -> None:
        """Another step begins to be sampled."""
        self._waiting: dict[int, dict[int, Group | None]] = {}
        self._begun: list[_Begun] = []
        # Passes whose groups are all graded, for which the ranks have no turn yet.
        self._ready: deque[list[Group]] = deque()
        # Those that the ranks may be at work on.
        self._under_way: list[PassAhead] = []
        # The first pass that is not ready, with ``in_order``.
        self._next = 0

    def see(self, place: int, group: Group | None) -> None:
        """Take a group that was graded.

        Args:
            place: Among the groups that the step admits, from 0.
            group: ``None``: the filter dropped it.
        """
        number = place // self._groups_per_pass
        self._waiting.setdefault(number, {})[place] = group
        if not self._in_order:
            if self._is_complete(number):
                self._set_ready(number)
        else:
            while self._is_complete(self._next):
                self._set_ready(self._next)
                self._next += 1
        self.look()

    def look(self) -> None:
        """Begin what the ranks have a turn for; never waits."""
        self._under_way = [one for one in self._under_way if not self._is_done(one)]
        while self._ready and len(self._under_way) < MOST_BEGUN:
            self._make(self._ready.popleft())

    def take(self, groups: Sequence[Group]) -> list[StepPass]:
        """All passes of the step, those included that are only begun now.

        Args:
            groups: Of the step. Those that it did not admit, as an earlier step left them, are the
                last pass.

        Returns:
            Passes that have each sample once, in the order of their first samples; with
            ``in_order``, in the order in which they were begun.
        """
        for number in sorted(self._waiting):
            self._set_ready(number)
        while self._ready:
            self._make(self._ready.popleft())
        begun = {id_ for one in self._begun for id_ in one.problems}
        rest = [group for group in groups if group.problem.id not in begun]
        if rest:
            self._make(rest)
        places: dict[str, range] = {}
        first = 0
        for group in groups:
            places[group.problem.id] = range(first, first + len(group.samples))
            first += len(group.samples)
        found = [
            StepPass(tuple(p for id_ in one.problems for p in places[id_]), one.made)
            for one in self._begun
        ]
        return found if self._in_order else sorted(found, key=lambda one: one.places)

    def _is_complete(self, number: int) -> bool:
        return len(self._waiting.get(number, ())) == self._groups_per_pass

    def _set_ready(self, number: int) -> None:
        decided = self._waiting.pop(number)
        kept = [group for _, group in sorted(decided.items()) if group is not None]
        if kept:
            self._ready.append(kept)

    def _make(self, groups: Sequence[Group]) -> None:
        made = self._begin_pass(groups, not self._begun)
        self._begun.append(_Begun(tuple(group.problem.id for group in groups), made))
        self._under_way.append(made)
