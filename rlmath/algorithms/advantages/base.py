"""Statistics over groups and batches for the estimators, in float64.

A sample without a reward (NaN) is left out of all statistics and gets advantage 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlmath.algorithms.advantages.whiten import whiten
from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


class Advantage(Protocol):
    """Map the rewards of a batch to advantages.

    Args:
        rewards: ``[N]`` float, NaN where the sample is unscored.
        group_ids: ``[N]`` int64.
        options: The estimator's options, see ``Registry.options``.
        token_counts: ``[N]`` response tokens in the loss, for estimators that whiten over tokens;
            the others ignore it.

    Returns:
        ``[N]``, in the rewards' dtype (computed in float64): one advantage for all tokens of a
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
    """Options of an estimator that divides by a standard deviation."""

    epsilon: float = setting(
        1e-6, "Added to the standard deviation that advantages are divided by.", least=0
    )


@dataclass(frozen=True)
class AdvantageTraits:
    """Properties of an estimator.

    Attributes:
        compares: Compares the samples of a group, so a group of one gets advantage 0.
        within_groups: A sample's advantage depends only on the rewards of its group; otherwise on
            those of the whole step.
        reads_rewards: Otherwise an unscored sample is trained on like any other.
        each_reward: Takes each reward separately, ``[N, K]``, and an argument ``weights``.
        before_whitening: For an estimator that whitens over tokens: the ``[N]`` values before
            whitening, from the groups. A penalty per token is added to these.
        needs_values: Works on tokens and a value model, and is called like ``gae``.
    """

    compares: bool = True
    within_groups: bool = False
    reads_rewards: bool = True
    each_reward: bool = False
    before_whitening: Callable[[Groups], Tensor] | None = None
    needs_values: bool = False


# Values are :class:`Advantage`; an estimator that ``needs_values`` is called like ``gae``.
ADVANTAGES: Registry[Any, AdvantageTraits] = Registry("algorithm.advantage", AdvantageTraits)


def needs_value_model(name: str) -> bool:
    """Whether the estimator named ``name`` works on tokens and a value model."""
    return ADVANTAGES.has(name) and ADVANTAGES.traits(name).needs_values


class Groups:
    """Sums and means of scored samples within groups.

    Attributes:
        rewards: ``[N]`` float64 with 0 for unscored samples.
        scored: ``[N]`` bool.
        ids: ``[N]`` int64, groups numbered from 0.
        sizes: ``[N]`` float64, number of scored samples in each sample's group.
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

    def center_rewards(self) -> Tensor:
        """``[N]`` reward minus its group's mean; exactly 0 in a group of equal rewards."""
        difference = torch.where(self.scored, self.rewards - self.mean(), 0.0)
        # The mean of equal numbers may have a rounding error, which a tiny std would magnify.
        return torch.where(self._equal(), 0.0, difference)

    def std(self) -> Tensor:
        """``[N]`` standard deviation (Bessel) of each sample's group; 0 in a group of one."""
        return (self.sum(self.center_rewards().square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def std_of_others(self) -> Tensor:
        """``[N]`` standard deviation (Bessel) of the other samples of each sample's group.

        0 where these are all equal, and in groups of fewer than three.
        """
        own = self.center_rewards().square()
        total = self.sum(own)
        # The others' mean differs from the group's by own / (n - 1).
        left = total - own * self.sizes / (self.sizes - 1).clamp(min=1)
        # A tiny remainder is the rounding error of equal values.
        left = torch.where(left > 1e-12 * total, left, 0.0)
        return (left / (self.sizes - 2).clamp(min=1)).sqrt()

    def _equal(self) -> Tensor:
        """``[N]`` whether all scored rewards of the group are equal."""

        def extreme(name: str, none: float) -> Tensor:
            scored = torch.where(self.scored, self.rewards, none)
            start = scored.new_full((self._count,), none)
            return start.scatter_reduce(0, self.ids, scored, name)

        return (extreme("amax", -torch.inf) <= extreme("amin", torch.inf))[self.ids]


def estimator(
    name: str,
    options: type[Options] = Options,
    traits: AdvantageTraits | None = None,
    *,
    whitens_tokens: bool = False,
) -> Callable[[Callable[[Groups, Any], Tensor]], Advantage]:
    """Decorator: make an :class:`Advantage` of a function of groups and options, which returns
    ``[N]`` float64, and register it as ``name``.

    Args:
        name: Name of the estimator in the settings.
        options: Type of its options.
        traits: Its properties.
        whitens_tokens: Whiten the values over all response tokens of the batch: every token has its
            sequence's value, so a long sequence has more weight in mean and standard deviation.
    """
    traits = traits or AdvantageTraits()

    def wrap(estimate: Callable[[Groups, Any], Tensor]) -> Advantage:
        @functools.wraps(estimate, ("__module__", "__name__", "__qualname__", "__doc__"))
        def advantage(
            rewards: Tensor, group_ids: Tensor, options: Any, *, token_counts: Tensor | None = None
        ) -> Tensor:
            groups = Groups(rewards, group_ids)
            values = estimate(groups, options)
            if whitens_tokens:
                if token_counts is None:
                    raise ValueError(
                        f"algorithm.advantage = {name!r} whitens over tokens: it needs token_counts"
                    )
                values = whiten(values, token_counts * groups.scored, options.epsilon)
            return values.to(rewards.dtype)

        del advantage.__wrapped__  # which is called in another way
        before = (lambda groups: estimate(groups, None)) if whitens_tokens else None
        ADVANTAGES.register(name, options, replace(traits, before_whitening=before))(advantage)
        return advantage

    return wrap
