"""Statistics over groups and batches that the estimators share, in float64.

A sample without a reward (not-a-number) takes no part in any statistic and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


class Advantage(Protocol):
    """Rewards of a batch to advantages.

    Args:
        rewards: ``[N]`` float, not-a-number where nothing could score the sample.
        group_ids: ``[N]`` int64.
        options: The estimator's own, see ``Registry.options``.
        token_counts: ``[N]`` response tokens that take part in the loss, for estimators that
            whiten over tokens; the others do not read it.

    Returns:
        ``[N]``, of the rewards' dtype (worked out in float64): one advantage for all tokens of a
        sequence.
    """

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        options: Any,
        *,
        token_counts: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class EpsilonOptions(Options):
    """Of an estimator that divides by a standard deviation."""

    epsilon: float = setting(
        1e-6, "Added to the standard deviation that advantages are divided by.", least=0
    )


@dataclass(frozen=True)
class AdvantageTraits:
    """What is true of an estimator.

    Attributes:
        compares: It compares the samples of a group: of a group of one the advantage is 0.
        within_groups: A sample's advantage needs no more than the rewards of its group; else it
            needs those of the whole step.
        reads_rewards: Else a sample that nothing could score takes part all the same.
        each_reward: It reads each reward separately, ``[N, K]``, and has an argument ``weights``.
        before_whitening: Of one that whitens over tokens, what it whitens, ``[N]`` from the groups:
            a penalty per token is added to that.
        needs_values: It works on tokens and a value model, and is called as ``gae`` is.
    """

    compares: bool = True
    within_groups: bool = False
    reads_rewards: bool = True
    each_reward: bool = False
    before_whitening: Callable[[Groups], Tensor] | None = None
    needs_values: bool = False


# Of :class:`Advantage`; an estimator that ``needs_values`` is called as ``gae`` is.
ADVANTAGES: Registry[Any, AdvantageTraits] = Registry("algorithm.advantage", AdvantageTraits)


def needs_value_model(name: str) -> bool:
    """Whether the estimator called ``name`` works on tokens and a value model."""
    return ADVANTAGES.has(name) and ADVANTAGES.traits(name).needs_values


class Groups:
    """Sums and means of scored samples within groups.

    Attributes:
        rewards: ``[N]`` float64 with 0 for unscored samples.
        scored: ``[N]`` bool.
        ids: ``[N]`` int64, groups numbered from 0.
        sizes: ``[N]`` float64, scored samples in each sample's group.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        if rewards.shape != group_ids.shape or rewards.dim() != 1:
            raise ValueError(
                f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} have to be "
                f"of one shape [N]"
            )
        if rewards.isinf().any():
            raise ValueError(f"reward {int(rewards.isinf().nonzero()[0])} is infinite")
        self.scored = ~rewards.isnan()
        self.rewards = torch.where(self.scored, rewards.double(), 0.0)
        names, self.ids = torch.unique(group_ids, return_inverse=True)
        self._count = names.numel()
        self.sizes = self.sum(self.scored.double())

    def sum(self, values: Tensor) -> Tensor:
        """``[N]`` sum of ``values`` (0 where unscored) over each sample's group."""
        totals = values.new_zeros(self._count).index_add_(0, self.ids, values)
        return totals[self.ids]

    def mean(self) -> Tensor:
        """``[N]`` mean reward of each sample's group."""
        return self.sum(self.rewards) / self.sizes.clamp(min=1)

    def centered(self) -> Tensor:
        """``[N]`` reward less its group's mean; exactly 0 in a group whose rewards are equal."""
        difference = torch.where(self.scored, self.rewards - self.mean(), 0.0)
        # The mean of equal numbers can be off by a rounding error, which a tiny std would blow up.
        return torch.where(self._equal(), 0.0, difference)

    def std(self) -> Tensor:
        """``[N]`` Bessel's standard deviation of each sample's group; 0 in a group of one."""
        return (self.sum(self.centered().square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def std_of_others(self) -> Tensor:
        """``[N]`` Bessel's standard deviation of the other samples of each sample's group.

        0 where they are all equal, and in groups of fewer than three.
        """
        own = self.centered().square()
        total = self.sum(own)
        # The others' mean is off by own / (n - 1) from the group's.
        left = total - own * self.sizes / (self.sizes - 1).clamp(min=1)
        # What remains of equal others is rounding.
        left = torch.where(left > 1e-12 * total, left, 0.0)
        return (left / (self.sizes - 2).clamp(min=1)).sqrt()

    def _equal(self) -> Tensor:
        """``[N]`` whether all scored rewards of the group are the same."""
        high = torch.full((self._count,), -torch.inf, dtype=torch.float64)
        low = -high
        high = high.to(self.ids.device).scatter_reduce(
            0, self.ids, torch.where(self.scored, self.rewards, -torch.inf), "amax"
        )
        low = low.to(self.ids.device).scatter_reduce(
            0, self.ids, torch.where(self.scored, self.rewards, torch.inf), "amin"
        )
        return (high <= low)[self.ids]


def needs_token_counts(name: str, token_counts: Tensor | None) -> Tensor:
    """``token_counts``, or an error that says who needs them."""
    if token_counts is None:
        raise ValueError(
            f"algorithm.advantage = {name!r} whitens over tokens: it needs token_counts"
        )
    return token_counts
