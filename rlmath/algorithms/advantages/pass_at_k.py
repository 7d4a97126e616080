"""Advantages that raise the probability of one right answer among k samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits, EpsilonOptions, Groups
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import setting


@dataclass(frozen=True)
class PassAtKOptions(EpsilonOptions):
    k: int = setting(4, "The number of samples of which one must be correct.", least=1)
    correct_above: float = setting(0.0, "A sample is correct if its reward is above this.")


@ADVANTAGES.register("pass_at_k", PassAtKOptions, AdvantageTraits(within_groups=True))
def pass_at_k(
    rewards: Tensor,
    group_ids: Tensor,
    options: PassAtKOptions,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """The expected advantage of a sample over all sets of ``k`` samples that contain it.

    With ``n`` samples in a group, ``c`` of them right, the mean and the standard deviation of the
    sets' rewards (1 if any sample of the set is right) are

        m = 1 - C(n - c, k) / C(n, k),    s = sqrt(m (1 - m))

    and the advantages, from "Pass@k Training" (arXiv:2508.10751), §2.4:

        right: (1 - m) / (s + epsilon)
        wrong: (1 - m - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (s + epsilon)

    ``k = 1`` is ``grpo`` on rewards 0 and 1 with the population standard deviation.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64.
        options: ``k`` is the size of a set. A group with fewer scored samples is a single set,
            which gives no advantage.
        token_counts: Ignored.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored.
    """
    groups = Groups(rewards, group_ids)
    right = groups.scored & (groups.rewards > options.correct_above)
    sizes = groups.sizes.long().tolist()
    rights = groups.sum(right.double()).long().tolist()
    table = {
        (n, c): _advantages(n, c, min(options.k, n), options.epsilon)
        for n, c in set(zip(sizes, rights, strict=True))
        if n > 0
    }
    values = [
        table[n, c][0 if is_right else 1] if is_scored else 0.0
        for n, c, is_right, is_scored in zip(
            sizes, rights, right.tolist(), groups.scored.tolist(), strict=True
        )
    ]
    return torch.tensor(values, dtype=rewards.dtype, device=rewards.device)


def _advantages(n: int, c: int, k: int, epsilon: float) -> tuple[float, float]:
    """Advantages of a right and of a wrong sample."""
    failing = math.comb(n - c, k) / math.comb(n, k)
    std = math.sqrt(failing * (1.0 - failing))
    right = failing / (std + epsilon)
    if c == n:
        return right, 0.0
    failing_with_it = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
    return right, (failing - failing_with_it) / (std + epsilon)
