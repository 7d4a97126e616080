from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.algorithms.filters import GROUP_FILTERS, GroupScores
from rlmath.commands.plugin_test.finding import Finding, findings
from rlmath.utils.setting import Options

CASES = (
    GroupScores((1.0, 0.0, 0.0, 0.5), (True, False, False, None)),
    GroupScores((0.3, 0.3, 0.3), (True, True, True)),
    GroupScores((-2.0, 5.0), (False, True)),
    GroupScores((0.0, 0.0, 0.0, 0.0), (False, False, False, False)),
    GroupScores((1.0, 1.0), (True, None)),
)


def check_filter(name: str) -> Iterator[Finding]:
    part = _Part(name, GROUP_FILTERS.options(name)())
    tests = {
        "result is true or false": part.result,
        "deterministic": part.deterministic,
        "order of samples makes no difference": part.order,
    }
    if GROUP_FILTERS.traits(name).compares:
        tests["compares: a group of one is dropped"] = part.group_of_one
    return findings(tests)


@dataclass(frozen=True)
class _Part:
    name: str
    options: Options

    def keeps(self, scores: GroupScores) -> bool:
        return GROUP_FILTERS.get(self.name)(scores, self.options)

    def result(self) -> Iterator[str]:
        for scores in CASES:
            found = self.keeps(scores)
            if not isinstance(found, bool):
                yield f"of {scores} it is {found!r}"

    def deterministic(self) -> Iterator[str]:
        # The order in which engines finish decides which groups it has seen before.
        first = [self.keeps(scores) for scores in CASES]
        again = [self.keeps(scores) for scores in reversed(CASES)][::-1]
        for scores, one, other in zip(CASES, first, again, strict=True):
            if one != other:
                yield f"of {scores} it was {one}, and {other} after other groups"

    def order(self) -> Iterator[str]:
        for scores in CASES:
            found = self.keeps(scores)
            for rows in itertools.permutations(range(len(scores.rewards))):
                moved = GroupScores(
                    tuple(scores.rewards[i] for i in rows), tuple(scores.correct[i] for i in rows)
                )
                if self.keeps(moved) != found:
                    yield f"of {scores} it is {found}, of {moved} it is not"

    def group_of_one(self) -> Iterator[str]:
        for reward in (0.0, 1.0, -3.0):
            if self.keeps(GroupScores((reward,), (reward > 0,))):
                yield f"a group of the one reward {reward:g} is kept"
