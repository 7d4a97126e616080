"""Estimates of the KL divergence between policy and reference from sampled tokens.

With ``d = log pi_ref(y) - log pi(y)`` for a token ``y`` sampled from ``pi``:

=========== ============================== =====================================================
estimator   value                          as a term of the loss
=========== ============================== =====================================================
k1          ``-d``                         unbiased value; its gradient is 0 on average, so it
                                           belongs in the reward
k2          ``d^2 / 2``                    biased value; on policy, its gradient is the KL's
k3          ``exp(d) - 1 - d``             unbiased value, never negative; biased gradient
k3_unbiased ``r (exp(d) - 1 - d)``         k3 times the importance ratio ``r = pi / pi_old``:
                                           value and gradient also unbiased off policy
=========== ============================== =====================================================

k1 to k3: J. Schulman, "Approximating KL divergence" (2020); k3 in GRPO (arXiv:2402.03300), eq. 4;
gradients of k2 and k3: arXiv:2512.21852; k3_unbiased: DeepSeek-V3.2 (arXiv:2512.02556), eq. 7.

``exp`` overflows, so k3 clamps ``d`` to ±20 and its value to 10, with gradient 0 beyond, like
verl's ``low_var_kl``; ``r`` is clamped to ``e^±20`` as in the policy losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options

# Bounds of k3's input and value, in nats.
K3_INPUT_LIMIT = 20.0
K3_LIMIT = 10.0

# (log_probs, ref_log_probs, old_log_probs, options) -> nats; log-probs and result have one shape
KlEstimator = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class KlTraits:
    """Properties of a KL estimator."""

    # As a cost in the reward, without gradient, its policy gradient is the KL's.
    in_reward: bool = False


KL_ESTIMATORS: Registry[KlEstimator, KlTraits] = Registry("algorithm.kl_estimator", KlTraits)


def kl_estimate(
    name: str,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    old_log_probs: Tensor,
    options: Options | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) at each token, in nats, with gradient.

    Args:
        name: One of the module's estimators.
        log_probs: The policy's, any shape.
        ref_log_probs: The reference's, same shape.
        old_log_probs: The sampling policy's, same shape; only ``k3_unbiased`` uses it.
        options: The estimator's options; ``None``: its defaults.

    Raises:
        ValueError: Unknown estimator.
    """
    options = KL_ESTIMATORS.options(name)() if options is None else options
    return KL_ESTIMATORS.get(name)(log_probs, ref_log_probs, old_log_probs, options)


@KL_ESTIMATORS.register("k1", traits=KlTraits(in_reward=True))
def k1(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor, options: Options) -> Tensor:
    """``log pi - log pi_ref``."""
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor, options: Options) -> Tensor:
    """Half the square of the difference of log-probs."""
    return 0.5 * (log_probs - ref_log_probs).square()


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor, options: Options) -> Tensor:
    """``exp(d) - 1 - d``, at most 10; ``expm1`` keeps the digits of a small ``d``."""
    d = (ref_log_probs - log_probs).clamp(-K3_INPUT_LIMIT, K3_INPUT_LIMIT)
    return (torch.expm1(d) - d).clamp(-K3_LIMIT, K3_LIMIT)


@KL_ESTIMATORS.register("k3_unbiased")
def k3_unbiased(
    log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor, options: Options
) -> Tensor:
    """``k3`` times the importance ratio; the gradient also flows through the ratio."""
    log_ratio = (log_probs - old_log_probs).clamp(-K3_INPUT_LIMIT, K3_INPUT_LIMIT)
    return log_ratio.exp() * k3(log_probs, ref_log_probs, old_log_probs, options)
