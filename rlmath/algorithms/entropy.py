"""The policy's entropy: held at a target, or used to pick the tokens that decide."""

from __future__ import annotations

import math

from rlmath.utils.lazy_torch import Tensor, torch


def next_entropy_coef(
    coef: float, entropy: float, target: float, step_size: float, largest: float
) -> float:
    """The entropy bonus' weight for the next step.

    Skywork-OR1 (arXiv:2505.22312), adaptive entropy control: up by ``step_size`` while the entropy
    is below the target, down by as much while it is not, never below 0.

    Args:
        coef: The weight now.
        entropy: Mean entropy over the step's response tokens, in nats.
        target: In nats.
        step_size: Change per step.
        largest: Upper bound of the weight.

    Raises:
        ValueError: An entropy that is not finite, or numbers below 0.
    """
    if not math.isfinite(entropy):
        raise ValueError(f"entropy = {entropy}: not finite")
    for name, value in (("target", target), ("step_size", step_size), ("largest", largest)):
        if value < 0:
            raise ValueError(f"entropy control: {name} = {value}: at least 0 is needed")
    moved = coef + step_size if entropy < target else coef - step_size
    return min(max(moved, 0.0), largest)


def active_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """``coef`` while the entropy is at most the target, else 0 (Skywork-OR1)."""
    return coef if entropy <= target else 0.0


def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The unmasked tokens of highest entropy; the others have no policy loss.

    "Beyond the 80/20 rule" (arXiv:2506.01939): the gradient of the 20 % of tokens at which
    the reasoning forks is enough, or better than that of all. The threshold is taken over the
    whole batch, so this has to be made before the batch is cut. It is a factor on the tokens'
    weights in the policy term (``TrainingBatch.policy_factors``): the loss mask, and with it all
    denominators and the other terms, stay what they are, as in the paper's equation.

    Args:
        entropy: ``[R]``, in nats, of the policy that sampled.
        mask: ``[R]`` bool.
        share: Of the unmasked tokens, above 0 and at most 1.

    Returns:
        ``[R]`` bool, with ``ceil(share * unmasked)`` tokens, and more only when several have the
        entropy of the last one.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share of top-entropy tokens = {share}: above 0 and at most 1 is needed")
    values = entropy[mask]
    if not values.numel():
        return mask.clone()
    # Not one token more for a product such as 0.1 * 30, which is a little above 3.
    keep = max(math.ceil(share * values.numel() - 1e-9), 1)
    threshold = torch.kthvalue(values, values.numel() - keep + 1).values
    return mask & (entropy >= threshold)
