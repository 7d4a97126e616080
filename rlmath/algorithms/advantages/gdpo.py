"""Several rewards, each normalized within its group before they are added."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits, EpsilonOptions, Groups
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.utils.lazy_torch import Tensor, torch


def gdpo(
    rewards: Tensor,
    group_ids: Tensor,
    options: EpsilonOptions,
    *,
    token_counts: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Z-score of each reward in its group, weighted sum, z-score of the sum over the batch.

    GDPO (arXiv:2601.05242): adding rewards before the z-score would give different combinations
    of rewards the same advantage.

    Args:
        rewards: ``[N, K]``, or ``[N]`` for one reward; NaN where a reward is missing. A missing
            reward adds 0; a sample without any reward gets 0.
        group_ids: ``[N]`` int64.
        options: ``epsilon`` is added to the standard deviation.
        token_counts: Ignored: the batch's statistics are over samples.
        weights: Weights of the ``K`` rewards; ``None``: 1 each.

    Returns:
        ``[N]``, in the rewards' dtype.

    Raises:
        ValueError: The number of weights differs from the number of rewards.
    """
    table = rewards if rewards.dim() == 2 else rewards.unsqueeze(-1)
    factors = [1.0] * table.shape[1] if weights is None else list(weights)
    if len(factors) != table.shape[1]:
        raise ValueError(f"{len(factors)} weights for {table.shape[1]} rewards: one each is needed")
    total = torch.zeros(table.shape[0], dtype=torch.float64, device=table.device)
    for column, factor in enumerate(factors):
        groups = Groups(table[:, column], group_ids)
        total += factor * groups.center_rewards() / (groups.std() + options.epsilon)
    scored = ~table.isnan().all(dim=1)
    return whiten(total, scored, options.epsilon).to(rewards.dtype)


# Not a decorator, which would hide the argument ``weights``.
ADVANTAGES.register("gdpo", EpsilonOptions, AdvantageTraits(each_reward=True))(gdpo)
