"""The training objective: policy loss, KL term and entropy bonus, with its metrics.

Metrics, in addition to those of the loss (names as in ``losses.base``):

- ``weighted/loss``, ``weighted/policy_loss``, and with a reference ``weighted/kl_loss`` (the KL
  before its coefficient);
- ``weighted/signal``: ``sum w (f |A| + kl_coef + |entropy_coef|)``, which is 0 only if nothing in
  the minibatch can change a weight;
- ``weighted/entropy_term``: the entropy bonus before its coefficient, 0 without one, and
  ``weighted/term_sizes``: the loss's sum with absolute values of the tokens' terms;
- ``weighted/loss_weight``, ``weighted/loss_weight_squares``: sums of the tokens' weights and of
  their squares, which depend only on the lengths and the aggregation;
- ``token/importance_ratio``, ``token/ratio_over_threshold``, ``token/approx_kl`` (k3 of the old
  against the current policy), ``token/entropy`` if given, ``token/kl`` with a reference;
- with ``off_policy_mask_kl`` ``token/off_policy_masked``;
- ``count/token``, ``count/nonfinite``: unmasked tokens, and how many of them have a loss,
  log-ratio, KL or entropy that is not finite;
- ``count/log_ratio_clamped``: unmasked tokens whose log-ratio is beyond ``LOG_RATIO_LIMIT``;
  ``farthest`` is the one furthest beyond it;
- maximum ``importance_ratio_max``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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

    Returns:
        The objective of this micro-batch; a minibatch's micro-batches add up to its objective.

    Raises:
        ValueError: Unknown loss or estimator; a KL term without ``ref_log_probs``; an entropy
            bonus without ``entropy``.
    """
    policy_inputs, left_out = _policy_inputs(inputs, settings)
    policy = get_loss(settings.loss)(policy_inputs, settings.loss_options)
    weights, policy_weights = inputs.token_weights(), policy_inputs.token_weights()
    terms = _Terms(
        loss=policy.loss,
        token_losses=policy.token_losses,
        sizes=(policy_weights * policy.token_losses.abs()).sum(),
        bonus=policy.loss.new_zeros(()),
        checked=[policy.token_losses],
        sums=dict(policy.metric_sums),
    )
    if left_out is not None:
        terms.sums["token/off_policy_masked"] = left_out.sum().double()
    _add_kl(terms, inputs, settings, weights)
    _add_entropy(terms, inputs, settings, weights)
    pull = policy_weights * inputs.token_advantages().abs()
    pull = pull + weights * (settings.kl_coef + abs(settings.entropy_coef))
    terms.sums |= {
        "weighted/loss": terms.loss.detach().double(),
        "weighted/signal": pull.detach().sum().double(),
        "weighted/entropy_term": terms.bonus.double(),
        "weighted/term_sizes": terms.sizes.double(),
        "weighted/loss_weight": weights.double().sum(),
        "weighted/loss_weight_squares": weights.double().square().sum(),
    }
    largest, farthest = _add_ratios(terms, inputs, settings)
    return dataclasses.replace(
        policy,
        loss=terms.loss,
        token_losses=terms.token_losses,
        metric_sums=terms.sums,
        metric_maxima=policy.metric_maxima | {"importance_ratio_max": largest},
        farthest=farthest,
        off_policy_masked=left_out,
    )


@dataclass
class _Terms:
    """The objective while its terms are added."""

    loss: Tensor  # Their sum.
    token_losses: Tensor  # Each token's, without its weight.
    sizes: Tensor  # The sum with absolute values of the tokens' terms.
    bonus: Tensor  # The entropy bonus before its coefficient.
    checked: list[Tensor]  # Values of tokens that have to be finite.
    sums: dict[str, Tensor]  # Metrics.


def _policy_inputs(
    inputs: LossInputs, settings: ObjectiveSettings
) -> tuple[LossInputs, Tensor | None]:
    """The inputs with the weights of the policy loss, and the tokens that the off-policy mask
    leaves out, if there is one."""
    weights, left_out = inputs.weights, None
    if inputs.policy_factors is not None:
        weights = weights * inputs.policy_factors
    if settings.off_policy_mask_kl is not None:
        kept = off_policy_keep(inputs, settings.off_policy_mask_kl)
        weights = torch.where(kept, weights, torch.zeros_like(weights))
        left_out = inputs.mask & ~kept
    return dataclasses.replace(inputs, weights=weights), left_out


def _add_kl(
    terms: _Terms, inputs: LossInputs, settings: ObjectiveSettings, weights: Tensor
) -> None:
    if inputs.ref_log_probs is None:
        if settings.kl_coef:
            raise ValueError(f"kl_coef = {settings.kl_coef} needs ref_log_probs, which are missing")
        return
    # Masked before the estimate, so no value at a masked token reaches exp().
    kl = kl_estimate(
        settings.kl_estimator,
        inputs.zero_masked(inputs.log_probs),
        inputs.zero_masked(inputs.ref_log_probs),
        inputs.zero_masked(inputs.old_log_probs),
        settings.kl_options,
    )
    terms.sums["weighted/kl_loss"] = (weights * kl).detach().sum().double()
    terms.sums["token/kl"] = kl.detach().double().sum()
    terms.checked.append(kl.detach())
    if settings.kl_coef:
        terms.loss = terms.loss + settings.kl_coef * (weights * kl).sum()
        terms.sizes = terms.sizes + settings.kl_coef * (weights * kl.detach().abs()).sum()
        terms.token_losses = terms.token_losses + settings.kl_coef * kl.detach()


def _add_entropy(
    terms: _Terms, inputs: LossInputs, settings: ObjectiveSettings, weights: Tensor
) -> None:
    if inputs.entropy is None:
        if settings.entropy_coef:
            raise ValueError(
                f"entropy_coef = {settings.entropy_coef} needs entropy, which is missing"
            )
        return
    entropy = inputs.zero_masked(inputs.entropy)
    terms.sums["token/entropy"] = entropy.detach().double().sum()
    terms.checked.append(entropy.detach())
    if settings.entropy_coef:
        terms.loss = terms.loss - settings.entropy_coef * (weights * entropy).sum()
        terms.bonus = (weights * entropy).detach().sum()
        terms.sizes = terms.sizes + abs(settings.entropy_coef) * terms.bonus
        terms.token_losses = terms.token_losses - settings.entropy_coef * entropy.detach()


def _add_ratios(
    terms: _Terms, inputs: LossInputs, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Add metrics of importance ratios and of values that are not finite.

    Returns:
        The largest ratio; see ``LossOutput.farthest``.
    """
    raw_log_ratio = inputs.raw_log_ratio().detach().double()
    log_ratio = inputs.log_ratio().detach().double()
    ratio = log_ratio.exp()
    # The clamp makes a finite ratio of an infinite difference, so its input is checked.
    checked = [*terms.checked, raw_log_ratio]
    finite = torch.stack([values.isfinite() for values in checked]).all(dim=0)
    beyond = inputs.mask & (ratio > settings.ratio_threshold)
    terms.sums |= {
        "token/importance_ratio": inputs.zero_masked(ratio).sum(),
        "token/ratio_over_threshold": beyond.sum().double(),
        "token/approx_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "count/token": inputs.mask.sum().double(),
        "count/nonfinite": (inputs.mask & ~finite).sum().double(),
        "count/log_ratio_clamped": (raw_log_ratio.abs() > LOG_RATIO_LIMIT).sum().double(),
    }
    return _masked_max(ratio, inputs.mask), _farthest(raw_log_ratio)


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
