"""Input and output of a policy loss.

Letters in shapes: ``r`` response tokens of a micro-batch on one rank, ``n`` its sequences. A
sequence is never split over two micro-batches.

Metrics of a micro-batch are sums, so they add up over micro-batches and ranks; the first part of a
name gives the divisor of the total (see ``metric_means``):

- ``weighted/...``: none, because the token weights of the whole minibatch are already included;
- ``token/...``: ``count/token``, the unmasked tokens;
- ``count/...``: none, it is a count.

The set of names depends on the settings and not on the data, so every micro-batch has the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options

# Bound of a token's log importance ratio, in nats. In float32 ``exp`` overflows above 88.7, and the
# gradient of a clipped infinity is NaN. verl (``compute_policy_loss_vanilla``) and OpenRLHF
# (``PolicyLoss``) clamp at the same value with ``torch.clamp``: no gradient beyond.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Tokens of a micro-batch, all ``[r]`` and on one device.

    Values of masked tokens are never used, so they may be anything, including NaN.

    Attributes:
        log_probs: Log-probs of the policy being trained; with gradient.
        old_log_probs: Log-probs of the policy before this step's first update.
        engine_log_probs: Log-probs of the engine that sampled.
        advantages: Advantages per token.
        mask: Bool; false tokens are ignored.
        weights: Token weights from ``aggregation.sequence_weights`` over the whole minibatch.
        sequence_ids: int64, index within the micro-batch of each token's sequence, from 0,
            increasing.
        ref_log_probs: Log-probs of the reference model; ``None`` without one.
        entropy: Entropy of the policy's distribution at each token, in nats; with gradient if it is
            part of the loss. ``None``: not measured.
        policy_factors: Factors of ``weights`` in the policy term only; 0 excludes a token from it.
            ``None``: 1 each.
        num_sequences: Number of sequences in the micro-batch; ``None``: counted, for which the
            host waits for the GPU.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    engine_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequence_ids: Tensor
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    policy_factors: Tensor | None = None
    num_sequences: int | None = None

    def zero_masked(self, values: Tensor) -> Tensor:
        """``values`` at unmasked tokens; elsewhere 0, with gradient 0."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def raw_log_ratio(self) -> Tensor:
        """``[r]`` log of the importance ratio of the current to the old policy; 0 if masked."""
        return self.zero_masked(self.log_probs - self.old_log_probs)

    def log_ratio(self) -> Tensor:
        """The log-ratio clamped to ``±LOG_RATIO_LIMIT``; gradient 0 beyond.

        The probability of a token beyond it has changed by a factor of 5e8. Its gradient would be
        that large, or on the other side 0 up to rounding, so it carries no information and is
        excluded from the gradient. It still counts in the loss and in the denominators.
        """
        return self.raw_log_ratio().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """``[r]`` mean of ``values`` over the unmasked tokens of each token's sequence."""
        n = self.num_sequences
        if n is None:
            n = int(self.sequence_ids.max()) + 1 if self.sequence_ids.numel() else 0
        zeros = torch.zeros(n, dtype=values.dtype, device=values.device)
        totals = zeros.index_add(0, self.sequence_ids, self.zero_masked(values))
        counts = zeros.index_add(0, self.sequence_ids, self.mask.to(values.dtype))
        return (totals / counts.clamp(min=1))[self.sequence_ids]

    def token_advantages(self) -> Tensor:
        """``[r]`` advantages in the dtype of the log-probs, 0 at masked tokens."""
        return self.zero_masked(self.advantages.to(self.log_probs.dtype))

    def token_weights(self) -> Tensor:
        """``[r]`` weights in the dtype of the log-probs, 0 at masked tokens."""
        return self.zero_masked(self.weights.to(self.log_probs.dtype))


@dataclass(frozen=True)
class LossOutput:
    """The loss of a micro-batch.

    Attributes:
        loss: Scalar: the sum of weights times token losses. Losses of a minibatch's micro-batches
            add up to the minibatch's.
        token_losses: ``[r]``, before weighting, detached; 0 at masked tokens.
        metric_sums: Scalars (float64) that add up over micro-batches.
        metric_maxima: Scalars (float64) whose maximum over micro-batches is logged.
        farthest: ``[2]`` float64: index in the micro-batch of the unmasked token with the largest
            ``|log-ratio|``, and its log-ratio before the clamp; 0 and 0 without tokens. ``None``:
            not computed.
        off_policy_masked: ``[r]`` bool, tokens excluded by ``off_policy_mask_kl``; ``None``: no
            such mask.
    """

    loss: Tensor
    token_losses: Tensor
    metric_sums: dict[str, Tensor]
    metric_maxima: dict[str, Tensor]
    farthest: Tensor | None = None
    off_policy_masked: Tensor | None = None


OptionsT = TypeVar("OptionsT", bound=Options)

# A loss maps inputs and options to the loss of each token ``[r]``, with gradient, and to named
# booleans ``[r]`` to count.
TokenLoss = Callable[[LossInputs, OptionsT], tuple[Tensor, dict[str, Tensor]]]
# The second argument is the loss's options, see ``Registry.options``.
PolicyLoss = Callable[[LossInputs, Any], LossOutput]


@dataclass(frozen=True)
class LossTraits:
    """Properties of a policy loss.

    Attributes:
        aggregations: Aggregations that make the sum over tokens the objective of the loss's paper,
            the paper's own first; empty: any.
        bounds_ratio: Bounds the effect of a token's importance ratio, as samples of older weights
            require.
        of_sequences: A token's gradient reaches all tokens of its sequence.
        stops_gradient: Its gradient is intentionally not the gradient of its value.
    """

    aggregations: tuple[str, ...] = ()
    bounds_ratio: bool = True
    of_sequences: bool = False
    stops_gradient: bool = False


LOSSES: Registry[PolicyLoss, LossTraits] = Registry("algorithm.loss", LossTraits)


def policy_loss(
    name: str, options: type[OptionsT], traits: LossTraits | None = None
) -> Callable[[TokenLoss[OptionsT]], PolicyLoss]:
    """Decorator: make a policy loss out of a per-token function and register it as ``name``.

    Args:
        name: Name of the loss in the settings.
        options: Type of its options.
        traits: Its properties.
    """

    def wrap(token_loss: TokenLoss[OptionsT]) -> PolicyLoss:
        @functools.wraps(token_loss)
        def loss(inputs: LossInputs, given: OptionsT) -> LossOutput:
            losses, flags = token_loss(inputs, given)
            if losses.shape != inputs.log_probs.shape:
                raise ValueError(
                    f"algorithm.loss={name}: returned losses of shape {list(losses.shape)} for "
                    f"{inputs.log_probs.numel()} tokens: one for each is needed"
                )
            losses = inputs.zero_masked(losses)
            total = (inputs.token_weights() * losses).sum()
            sums = {"weighted/policy_loss": total.detach().double()}
            for key, flag in flags.items():
                sums[f"token/{key}"] = (flag & inputs.mask).sum().double()
            return LossOutput(total, losses.detach(), sums, {})

        LOSSES.register(name, options, traits)(loss)
        return loss

    return wrap


def metric_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide the totals over a minibatch's micro-batches as their names require.

    Args:
        sums: Totals of ``metric_sums`` over micro-batches and ranks.

    Returns:
        Names without their first part, except that ``count/x`` becomes ``x_count``. A mean over no
        tokens is 0.
    """
    tokens = sums.get("count/token", 0.0)
    means = {}
    for key, total in sums.items():
        kind, _, name = key.partition("/")
        if kind == "weighted":
            means[name] = float(total)
        elif kind == "token":
            means[name] = float(total) / tokens if tokens else 0.0
        elif kind == "count":
            means[f"{name}_count"] = float(total)
        else:
            raise ValueError(f"metric {key!r}: a name starts with weighted/, token/ or count/")
    return means
