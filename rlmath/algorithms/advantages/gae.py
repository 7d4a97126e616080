"""Generalized advantage estimation from a value model, per token."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits
from rlmath.utils.lazy_torch import Tensor, torch


@ADVANTAGES.register("gae", traits=AdvantageTraits(compares=False, needs_values=True))
def gae(
    token_rewards: Tensor, values: Tensor, response_lengths: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token.

    GAE (arXiv:1506.02438), eq. 16, backwards from the last token of each response, after which the
    value is 0:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    Args:
        token_rewards: ``[R]``; a sequence's reward is at its last token, a KL penalty at each.
        values: ``[R]``, the value model's estimate before each token.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        gamma: Discount per token; usually 1, because the length alone should not matter.
        lam: 1 uses rewards only, 0 the value model only.

    Returns:
        ``[R]`` advantages, not whitened, and ``[R]`` returns (advantage plus value), the targets
        of the value model; both in the values' dtype, computed in float64.

    Raises:
        ValueError: Shapes do not match.
    """
    total = int(response_lengths.sum())
    if token_rewards.shape != (total,) or values.shape != (total,):
        raise ValueError(
            f"response_lengths add up to {total} tokens, but there are {token_rewards.numel()} "
            f"rewards and {values.numel()} values"
        )
    lengths, order = torch.sort(response_lengths, descending=True)
    last = torch.cumsum(response_lengths, 0)[order] - 1
    next_value = torch.zeros(lengths.numel(), dtype=torch.float64, device=values.device)
    next_advantage = torch.zeros_like(next_value)
    rewards, value = token_rewards.double(), values.double()
    advantages = torch.zeros_like(value)
    # All sequences at once, one token further from their end per iteration. They are sorted by
    # length, so those with tokens left come first.
    active = torch.bincount(lengths, minlength=1).flip(0).cumsum(0).flip(0).tolist()
    for step in range(int(lengths[0]) if lengths.numel() else 0):
        n = active[step + 1]
        at = last[:n] - step
        delta = rewards[at] + gamma * next_value[:n] - value[at]
        next_advantage = delta + gamma * lam * next_advantage[:n]
        next_value = value[at]
        advantages[at] = next_advantage
    return advantages.to(values.dtype), (advantages + value).to(values.dtype)
