"""The KL coefficient over time, the KL penalty in the reward, and reference updates."""

from __future__ import annotations

from typing import Literal

from rlmath.utils.lazy_torch import Tensor, torch

ReferenceKind = Literal["frozen", "averaged", "reset"]


def next_kl_coef(
    coef: float, kl: float, target: float, horizon_samples: float, samples: int
) -> float:
    """The KL coefficient for the next step, by a proportional controller.

    "Fine-tuning language models from human preferences" (arXiv:1909.08593), §2.2:
    ``coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)``.

    Args:
        kl: Mean KL of this step's responses, in the target's unit (nats per token or sequence).
        target: KL to hold.
        horizon_samples: Samples over which an error of 20 % changes the coefficient by 20 %.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon_samples)


def kl_in_reward(kl: Tensor, mask: Tensor, response_lengths: Tensor, coef: float) -> Tensor:
    """Contribution of a KL penalty in the reward to each token's advantage.

    Each token costs ``coef * kl``; a token's advantage includes its own cost and that of the later
    tokens of the response: ``-coef * sum_{s >= t} kl_s`` (REINFORCE++, arXiv:2501.03262).
    Add it to the advantages; those of ``reinforce_pp`` are whitened afterwards.

    Args:
        kl: ``[R]`` k1 of the old policy against the reference, in nats, without gradient.
        mask: ``[R]`` bool; false tokens cost nothing.
        response_lengths: ``[N]`` int64, in tokens.

    Returns:
        ``[R]``, in the KL's dtype.
    """
    n = response_lengths.numel()
    ids = torch.repeat_interleave(torch.arange(n, device=kl.device), response_lengths)
    cost = torch.where(mask, kl.double(), 0.0)
    before = torch.cumsum(cost, 0) - cost
    ends = torch.cumsum(cost, 0)[(torch.cumsum(response_lengths, 0) - 1).clamp(min=0)]
    return (-coef * (ends[ids] - before)).to(kl.dtype)


def reference_weight(kind: ReferenceKind, step: int, *, every: int, decay: float) -> float:
    """Share of the policy's weights that is mixed into the reference after a step.

    The new reference is ``(1 - share) reference + share policy``.

    Args:
        kind: ``frozen``: never changes; ``averaged``: an exponential mean, every ``every`` steps;
            ``reset``: becomes the policy every ``every`` steps (ProRL, arXiv:2505.24864).
        step: Number of completed steps, from 1.
        every: Steps between changes.
        decay: Share of the reference that ``averaged`` keeps.

    Returns:
        0 (no change) to 1 (copy).
    """
    if kind == "frozen" or step < 1 or step % every:
        return 0.0
    return 1.0 if kind == "reset" else 1.0 - decay
