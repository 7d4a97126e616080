"""Generalized advantage estimation from a value model, per token."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits
from rlmath.utils.lazy_torch import Tensor, torch


@ADVANTAGES.register("gae", traits=AdvantageTraits(compares=False, needs_values=True))
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_lengths: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each response token.

    GAE (arXiv:1506.02438), eq. 16, from the last token of each response backwards:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    Args:
        token_rewards: ``[R]``; a sequence's reward stands at its last token, a KL penalty at each.
        values: ``[R]``, the value model's estimate before each token.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        gamma: Discount per token; 1 is usual, as the length alone should not matter.
        lam: 1 trusts rewards alone, 0 the value model alone.
        bootstrap_values: ``[N]`` value after the last token, for responses that were cut off;
            ``None``: 0, the response ended.

    Returns:
        ``[R]`` advantages, not whitened, and ``[R]`` returns (advantage plus value), which the
        value model learns; both of the values' dtype, worked out in float64.

    Raises:
        ValueError: Shapes that do not fit.
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
    if bootstrap_values is not None:
        next_value = bootstrap_values[order].double()
    next_advantage = torch.zeros_like(next_value)
    rewards, value = token_rewards.double(), values.double()
    advantages = torch.zeros_like(value)
    # All sequences at once, one token further from their end each time. They are sorted, so those
    # that still have tokens stand first.
    active = torch.bincount(lengths, minlength=1).flip(0).cumsum(0).flip(0).tolist()
    for step in range(int(lengths[0]) if lengths.numel() else 0):
        n = active[step + 1]
        at = last[:n] - step
        delta = rewards[at] + gamma * next_value[:n] - value[at]
        next_advantage = delta + gamma * lam * next_advantage[:n]
        next_value = value[at]
        advantages[at] = next_advantage
    return advantages.to(values.dtype), (advantages + value).to(values.dtype)
