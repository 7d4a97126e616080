"""The training objective: policy loss, KL term and entropy bonus, with its metrics."""

from __future__ import annotations

import dataclasses

from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.losses import LossInputs, LossOutput, get_loss
from rlmath.algorithms.losses.base import LOG_RATIO_LIMIT
from rlmath.algorithms.off_policy import off_policy_keep
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.utils.lazy_torch import Tensor, torch


def policy_objective(inputs: LossInputs, settings: ObjectiveSettings) -> LossOutput:
    """``sum_t w_t (f_t policy_loss_t + kl_coef KL_t - entropy_coef H_t)`` over a micro-batch.

    ``f_t`` are ``policy_factors`` and the off-policy mask: KL and entropy keep all tokens, as in
    recipes that correct for the engine (verl's ``rollout_is_weights`` and OpenRLHF's
    ``vllm_is_correction`` multiply the policy loss, and the KL loss is added afterwards).

    Metrics, in addition to those of the loss (names as in ``losses.base``):

    - ``weighted/loss``, ``weighted/policy_loss``, and with a reference ``weighted/kl_loss`` (the
      KL before its coefficient);
    - ``weighted/signal``: ``sum w (f |A| + kl_coef + |entropy_coef|)``, which is 0 only if nothing
      in the minibatch can change a weight;
    - ``weighted/entropy_term``: the entropy bonus before its coefficient, 0 without one, and
      ``weighted/term_sizes``: the loss's sum with absolute values of the tokens' terms;
    - ``weighted/loss_weight``, ``weighted/loss_weight_squares``: sums of the tokens' weights and of
      their squares, which depend only on the lengths and the aggregation;
    - ``token/importance_ratio``, ``token/ratio_over_threshold``, ``token/approx_kl`` (k3 of the
      old against the current policy), ``token/entropy`` if given, ``token/kl`` with a reference;
    - with ``off_policy_mask_kl`` ``token/off_policy_masked``;
    - ``count/token``, ``count/nonfinite``: unmasked tokens, and how many of them have a loss,
      log-ratio, KL or entropy that is not finite;
    - ``count/log_ratio_clamped``: unmasked tokens whose log-ratio is beyond ``LOG_RATIO_LIMIT``;
      ``farthest`` is the one furthest beyond it;
    - maximum ``importance_ratio_max``.

    Args:
        inputs: Tokens of the micro-batch.
        settings: The terms of the objective.

    Returns:
        The objective of this micro-batch; a minibatch's micro-batches add up to its objective.

    Raises:
        ValueError: Unknown loss or estimator; a KL term without ``ref_log_probs``; an entropy
            bonus without ``entropy``.
    """
    policy_weights, kept, left_out = inputs.weights, None, None
    if inputs.policy_factors is not None:
        policy_weights = policy_weights * inputs.policy_factors
    if settings.off_policy_mask_kl is not None:
        kept = off_policy_keep(inputs, settings.off_policy_mask_kl)
        policy_weights = torch.where(kept, policy_weights, torch.zeros_like(policy_weights))
    policy_inputs = dataclasses.replace(inputs, weights=policy_weights)
    policy = get_loss(settings.loss)(policy_inputs, settings.loss_options)
    weights, policy_weights = inputs.token_weights(), policy_inputs.token_weights()
    total, token_losses = policy.loss, policy.token_losses
    sums = dict(policy.metric_sums)
    if kept is not None:
        left_out = inputs.mask & ~kept
        sums["token/off_policy_masked"] = left_out.sum().double()
    terms = (policy_weights * token_losses.abs()).sum()
    checked, bonus = [token_losses], total.new_zeros(())

    if inputs.ref_log_probs is not None:
        # Masked before the estimate, so no value at a masked token reaches exp().
        kl = kl_estimate(
            settings.kl_estimator,
            inputs.masked(inputs.log_probs),
            inputs.masked(inputs.ref_log_probs),
            inputs.masked(inputs.old_log_probs),
            settings.kl_options,
        )
        sums["weighted/kl_loss"] = (weights * kl).detach().sum().double()
        sums["token/kl"] = kl.detach().double().sum()
        checked.append(kl.detach())
        if settings.kl_coef:
            total = total + settings.kl_coef * (weights * kl).sum()
            terms = terms + settings.kl_coef * (weights * kl.detach().abs()).sum()
            token_losses = token_losses + settings.kl_coef * kl.detach()
    elif settings.kl_coef:
        raise ValueError(f"kl_coef = {settings.kl_coef} needs ref_log_probs, which are missing")

    if inputs.entropy is not None:
        entropy = inputs.masked(inputs.entropy)
        sums["token/entropy"] = entropy.detach().double().sum()
        checked.append(entropy.detach())
        if settings.entropy_coef:
            total = total - settings.entropy_coef * (weights * entropy).sum()
            bonus = (weights * entropy).detach().sum()
            terms = terms + abs(settings.entropy_coef) * bonus
            token_losses = token_losses - settings.entropy_coef * entropy.detach()
    elif settings.entropy_coef:
        raise ValueError(f"entropy_coef = {settings.entropy_coef} needs entropy, which is missing")

    raw_log_ratio = inputs.raw_log_ratio().detach().double()
    log_ratio = inputs.log_ratio().detach().double()
    ratio = log_ratio.exp()
    # The clamp makes a finite ratio of an infinite difference, so its input is checked.
    checked.append(raw_log_ratio)
    finite = torch.stack([values.isfinite() for values in checked]).all(dim=0)
    pull = policy_weights * inputs.token_advantages().abs()
    pull = pull + weights * (settings.kl_coef + abs(settings.entropy_coef))
    sums |= {
        "weighted/loss": total.detach().double(),
        "weighted/signal": pull.detach().sum().double(),
        "weighted/entropy_term": bonus.double(),
        "weighted/term_sizes": terms.double(),
        "token/importance_ratio": inputs.masked(ratio).sum(),
        "token/ratio_over_threshold": (inputs.mask & (ratio > settings.ratio_threshold))
        .sum()
        .double(),
        "token/approx_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "weighted/loss_weight": weights.double().sum(),
        "weighted/loss_weight_squares": weights.double().square().sum(),
        "count/token": inputs.mask.sum().double(),
        "count/nonfinite": (inputs.mask & ~finite).sum().double(),
        "count/log_ratio_clamped": (raw_log_ratio.abs() > LOG_RATIO_LIMIT).sum().double(),
    }
    maxima = policy.metric_maxima | {"importance_ratio_max": _masked_max(ratio, inputs.mask)}
    return dataclasses.replace(
        policy,
        loss=total,
        token_losses=token_losses,
        metric_sums=sums,
        metric_maxima=maxima,
        farthest=_farthest(raw_log_ratio),
        off_policy_masked=left_out,
    )


def _farthest(log_ratio: Tensor) -> Tensor:
    """Index and log-ratio of the token with the largest ``|log-ratio|``; see ``LossOutput``."""
    if not log_ratio.numel():
        return log_ratio.new_zeros(2)
    # NaN is counted elsewhere, and would break the comparison.
    numbers = log_ratio.nan_to_num(nan=0.0)
    # As a vector: with a scalar index the host would wait for its value from the GPU.
    index = numbers.abs().argmax()[None]
    return torch.cat([index.double(), numbers[index]])


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest unmasked value; 0 (below any ratio) if there is none."""
    return torch.cat([values.new_zeros(1), torch.where(mask, values, 0.0)]).max()
