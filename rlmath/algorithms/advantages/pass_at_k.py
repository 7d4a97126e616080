"""Advantages that raise the probability of one right answer among k samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.algorithms.advantages.base import AdvantageTraits, EpsilonOptions, Groups, estimator
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import setting


@dataclass(frozen=True)
class PassAtKOptions(EpsilonOptions):
    k: int = setting(4, "The number of samples of which one must be correct.", least=1)
    correct_above: float = setting(0.0, "A sample is correct if its reward is above this.")


@estimator("pass_at_k", PassAtKOptions, AdvantageTraits(within_groups=True))
def pass_at_k(groups: Groups, options: PassAtKOptions) -> Tensor:
    """The expected advantage of a sample over all sets of ``k`` samples that contain it.

    With ``n`` samples in a group, ``c`` of them right, the mean and the standard deviation of the
    sets' rewards (1 if any sample of the set is right) are

        m = 1 - C(n - c, k) / C(n, k),    s = sqrt(m (1 - m))

    and the advantages, from "Pass@k Training" (arXiv:2508.10751), §2.4:

        right: (1 - m) / (s + epsilon)
        wrong: (1 - m - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (s + epsilon)

    ``k = 1`` is ``grpo`` on rewards 0 and 1 with the population standard deviation.
    A group with fewer than ``k`` scored samples is a single set, which gives no advantage.
    """
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
    return torch.tensor(values, dtype=torch.float64, device=right.device)


def _advantages(n: int, c: int, k: int, epsilon: float) -> tuple[float, float]:
    """Advantages of a right and of a wrong sample."""
    failing = math.comb(n - c, k) / math.comb(n, k)
    std = math.sqrt(failing * (1.0 - failing))
    right = failing / (std + epsilon)
    if c == n:
        return right, 0.0
    failing_with_it = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
    return right, (failing - failing_with_it) / (std + epsilon)
