from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.commands.plugin_test.finding import Finding, differs, findings, not_finite, repeats
from rlmath.utils.setting import Options

# Three groups, one sample of which nothing could score, and a group of equal rewards.
REWARDS = (1.0, 0.0, 0.0, 0.5, 0.2, torch.nan, 1.0, 0.4, 0.3, 0.3, 0.3, 0.3)
GROUPS = (4, 4, 4, 4, 1, 1, 1, 1, 7, 7, 7, 7)
TOKENS = (3, 1, 2, 5, 1, 2, 4, 4, 2, 2, 3, 1)
_EQUAL = 7
_OF_ORDER = 1e-9


def check_advantage(name: str) -> Iterator[Finding]:
    part = _Part(name, ADVANTAGES.options(name)())
    traits = ADVANTAGES.traits(name)
    tests = {
        "result has one number per sample": part.shapes,
        "unscored samples take no part": part.without_reward,
        "order of samples makes no difference": part.order,
        "a higher reward has no lower advantage": part.direction,
        "deterministic": repeats(part.run),
        "inputs are left alone": part.inputs_unchanged,
    }
    if traits.within_groups:
        tests["within_groups: other groups make no difference"] = part.within_groups
    if traits.compares:
        tests["compares: equal rewards of a group have advantage 0"] = part.equal_rewards
    if not traits.reads_rewards:
        tests = {key: tests[key] for key in ("deterministic", "inputs are left alone")}
    return findings(tests)


@dataclass(frozen=True)
class _Part:
    name: str
    options: Options

    def run(
        self, rewards: Tensor | None = None, rows: Tensor | None = None, dtype: Any = torch.float64
    ) -> Tensor:
        given = torch.tensor(REWARDS, dtype=dtype) if rewards is None else rewards
        at = torch.arange(len(given)) if rows is None else rows
        groups, tokens = torch.tensor(GROUPS), torch.tensor(TOKENS)
        estimate = ADVANTAGES.get(self.name)
        return estimate(given[at], groups[at], self.options, token_counts=tokens[at])  # type: ignore[no-any-return]

    def shapes(self) -> Iterator[str]:
        for dtype in (torch.float32, torch.float64):
            found = self.run(dtype=dtype)
            if found.shape != (len(REWARDS),) or found.dtype is not dtype:
                yield (
                    f"of {len(REWARDS)} rewards in {dtype} it is {list(found.shape)} {found.dtype}"
                )
            if problem := not_finite(found):
                yield f"advantage {problem}"

    def without_reward(self) -> Iterator[str]:
        found, gone = self.run(), torch.tensor(REWARDS).isnan()
        if problem := differs(found[gone], torch.zeros(1, dtype=found.dtype)):
            yield f"the advantage of a sample without a reward is not 0, {problem}"
        alone = self.run(rows=(~gone).nonzero().flatten())
        if problem := differs(found[~gone], alone, relative=_OF_ORDER):
            yield f"without that sample the others' advantages differ, {problem}"

    def order(self) -> Iterator[str]:
        rows = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
        if problem := differs(self.run(rows=rows), self.run()[rows], relative=_OF_ORDER):
            yield f"in another order the advantages differ, {problem}"

    def direction(self) -> Iterator[str]:
        found = self.run().tolist()
        for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
            for j, (other, its) in enumerate(zip(REWARDS, GROUPS, strict=True)):
                if group == its and reward > other and found[i] < found[j] - _OF_ORDER:
                    yield (
                        f"in a group the rewards {reward:g} and {other:g} have the advantages "
                        f"{found[i]:.9g} and {found[j]:.9g}"
                    )

    def inputs_unchanged(self) -> Iterator[str]:
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        # Views of it, which a function that writes in place would change.
        ADVANTAGES.get(self.name)(
            rewards, torch.tensor(GROUPS), self.options, token_counts=torch.tensor(TOKENS)
        )
        if problem := differs(rewards, torch.tensor(REWARDS, dtype=torch.float64)):
            yield f"rewards are changed {problem}"

    def within_groups(self) -> Iterator[str]:
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        others = torch.tensor(GROUPS) != GROUPS[0]
        moved = torch.where(others, 5.0 * rewards - 2.0, rewards)
        if problem := differs(self.run(moved)[~others], self.run(rewards)[~others]):
            yield f"with other rewards in other groups a group's advantages differ, {problem}"

    def equal_rewards(self) -> Iterator[str]:
        group = torch.tensor(GROUPS) == _EQUAL
        found = self.run()[group]
        if not ADVANTAGES.traits(self.name).within_groups:
            # Whitening may move all of them; they still have one advantage.
            wanted = found[:1].expand(len(found))
        else:
            wanted = torch.zeros_like(found)
        if problem := differs(found, wanted):
            yield f"in a group of rewards of 0.3, sample {problem}"
