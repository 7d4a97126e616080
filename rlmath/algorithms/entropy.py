"""Entropy control, and selection of the tokens of highest entropy."""

from __future__ import annotations

import math

from rlmath.algorithms.peers import ALONE, Peers
from rlmath.utils.lazy_torch import Tensor, torch

# Float32 numbers are compared by their bits, in two halves of 16 bits each.
_HALF = 2**16


def next_entropy_coef(
    coef: float, entropy: float, target: float, step_size: float, largest: float
) -> float:
    """Coefficient of the entropy bonus for the next step.

    Skywork-OR1 (arXiv:2505.22312), adaptive entropy control: increased by ``step_size`` while the
    entropy is below the target, otherwise decreased by it, never below 0.

    Args:
        entropy: Mean entropy over the step's response tokens, in nats.
        target: Target entropy in nats.
        step_size: Change per step.
        largest: Upper bound of the coefficient.

    Raises:
        ValueError: The entropy is not finite.
    """
    if not math.isfinite(entropy):
        raise ValueError(f"entropy = {entropy}: not finite")
    moved = coef + step_size if entropy < target else coef - step_size
    return min(max(moved, 0.0), largest)


def active_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """``coef`` while the entropy is at most the target, else 0 (Skywork-OR1)."""
    return coef if entropy <= target else 0.0


def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float, peers: Peers = ALONE) -> Tensor:
    """The unmasked tokens of highest entropy; the others have no policy loss.

    "Beyond the 80/20 rule" (arXiv:2506.01939): the gradient of the 20 % of tokens at which the
    reasoning forks is as good as or better than that of all tokens. The threshold is computed over
    the whole step. It multiplies the tokens' weights in the policy term
    (``TrainingBatch.policy_factors``); the loss mask, all denominators and the other terms are
    unchanged, as in the paper's equation.

    The threshold is exact and independent of how tokens are distributed: ranks add up histograms of
    the upper half of the floats' bits, and then of the lower half.

    Args:
        entropy: ``[R]`` float32, in nats, of the policy that sampled.
        mask: ``[R]`` bool.
        share: Share of the unmasked tokens, above 0 and at most 1.
        peers: Ranks whose tokens are included.

    Returns:
        ``[R]`` bool, with ``ceil(share * unmasked)`` tokens, or more if several have the entropy
        of the last one.
    """
    keys = _sortable(entropy)
    own = keys[mask]
    total = int(peers.add(torch.tensor([own.numel()])))
    if not total:
        return mask.clone()
    # The tolerance avoids one token too many for a product such as 0.1 * 30, slightly above 3.
    keep = max(math.ceil(share * total - 1e-9), 1)
    upper, below = _bin_of(total - keep, own // _HALF, peers)
    lower, _ = _bin_of(total - keep - below, own[own // _HALF == upper] % _HALF, peers)
    return mask & (keys >= upper * _HALF + lower)


def _sortable(values: Tensor) -> Tensor:
    """``[R]`` int64 from 0 to 2^32, in the order of the float32 values."""
    bits = values.float().contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + 2**31


def _bin_of(place: int, bins: Tensor, peers: Peers) -> tuple[int, int]:
    """The bin of the value at an index of the sorted values, and the count of lower bins."""
    counts = peers.add(torch.bincount(bins.cpu(), minlength=_HALF))
    ends = torch.cumsum(counts, 0)
    found = int(torch.searchsorted(ends, place, right=True))
    return found, int(ends[found] - counts[found])
