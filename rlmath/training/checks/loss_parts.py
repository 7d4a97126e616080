"""The loss of each minibatch is the sum of its terms, and a signal has a gradient.

The ranks add up the loss and its terms apart: a term that is missing from the loss, or has another
sign or coefficient than the settings say, leaves the curve of every term as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlmath.actor.sequence_report import SequenceReport
from rlmath.config.algorithm import KlPlace
from rlmath.training.checks.base import AfterUpdate, Metrics, StepCheck, report

# Relative to the sizes of the terms: the loss of a micro-batch rounds three times in float32 (6e-8
# each), and is then summed in float64.
TOLERANCE = 1e-6


class LossParts(StepCheck):
    """Compares the loss with its terms, and the gradient norm with the signal."""

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.result is None:
            return {}
        config = now.run.config
        in_loss = config.algorithm.kl_in is KlPlace.loss
        kl_coef = now.metrics["train/kl_coef"] if in_loss else 0.0
        entropy_coef = now.metrics["train/entropy_coef"]
        broken = [
            f"minibatch {index}: {one}"
            for index, figures in enumerate(now.result.minibatches)
            if not figures["discarded"]
            for one in wrong_loss(
                figures, kl_coef, entropy_coef, has_gradient(now.result.sequences, index)
            )
        ]
        report(config, broken, now.step, now.monitor)
        return {}


def has_gradient(found: SequenceReport | None, minibatch: int) -> bool:
    """Whether any sequence of a minibatch should have a gradient by the second formula; without
    one, yes. In a narrow range, as of ``gspo``, all may be clipped."""
    if found is None:
        return True
    wanted, slack, *_ = found.second[found.minibatches == minibatch].unbind(1)
    return not bool((wanted.abs() <= slack).all())


def wrong_loss(
    figures: Mapping[str, float], kl_coef: float, entropy_coef: float, has_gradient: bool = True
) -> list[str]:
    """Sentences about a minibatch whose loss is not the sum of its terms, or has no gradient.

    Args:
        kl_coef: Coefficient of the KL term in the loss; 0: there is none.
        entropy_coef: Coefficient of the entropy bonus.
        has_gradient: Whether its advantages say that it has a gradient.
    """
    broken = []
    loss, policy = figures["loss"], figures["policy_loss"]
    kl, entropy = figures.get("kl_loss", 0.0), figures["entropy_term"]
    wanted = policy + kl_coef * kl - entropy_coef * entropy
    sizes = abs(policy) + abs(kl_coef * kl) + abs(entropy_coef * entropy)
    tolerance = TOLERANCE * max(figures["term_sizes"], sizes)
    # Written so that NaN is reported.
    if not abs(loss - wanted) <= tolerance:
        guess = _guess(loss, policy, kl_coef * kl, entropy_coef * entropy)
        broken.append(
            f"the loss is {loss:.7g}, but policy loss {policy:.7g} + kl_coef {kl_coef:g} x KL "
            f"{kl:.7g} - entropy_coef {entropy_coef:g} x entropy {entropy:.7g} is {wanted:.7g} "
            f"(to within {tolerance:.1g}): {guess}"
        )
    # The signal of |advantages| alone: KL and entropy may have no gradient at their present values.
    signal = figures["signal"] - (kl_coef + abs(entropy_coef)) * figures["loss_weight"]
    if has_gradient and figures["grad_norm"] == 0 and signal > 1e-5 * figures["signal"]:
        broken.append(
            f"the gradient norm is exactly 0, though the advantages weigh {signal:.4g} "
            "(train/signal): no backward pass reached the weights"
        )
    return broken


def _guess(loss: float, policy: float, kl: float, entropy: float) -> str:
    """Names the term whose absence or sign explains the loss best."""
    candidates = {
        "the policy loss has the opposite sign": -policy + kl - entropy,
        "the KL term is missing": policy - entropy,
        "the KL term has the opposite sign": policy - kl - entropy,
        "the entropy bonus is missing": policy + kl,
        "the entropy bonus has the opposite sign": policy + kl + entropy,
    }
    name = min(candidates, key=lambda one: abs(candidates[one] - loss))
    return name if abs(candidates[name] - loss) <= 1e-4 * abs(loss) else "a term is wrong"
