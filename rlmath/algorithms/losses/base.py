"""What goes into a policy loss and what comes out of it.

Letters in shapes: ``r`` response tokens of a cut (a micro-batch on one rank), ``n`` sequences of
it. A sequence is never spread over two cuts.

Metrics of a cut are sums, so that they add up over micro-batches and ranks; the first part of a
name says what to divide the total by (``metric_means`` does it):

- ``weighted/...``: by nothing, the token weights of the whole minibatch are in it already;
- ``token/...``: by ``count/token``, the unmasked tokens;
- ``count/...``: a count, left as it is.

Which names there are depends on the settings and not on the data, so every cut has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options

# Bound of a token's log importance ratio, in nats. In float32 ``exp`` overflows above 88.7, and the
# gradient of a clip of infinity is not a number. verl (``compute_policy_loss_vanilla``) and
# OpenRLHF (``PolicyLoss``) clamp at the same value with ``torch.clamp``: no gradient beyond.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Tokens of a cut, all ``[r]``, of one device.

    Values of masked tokens are never read: they may be anything, not-a-number included.

    Attributes:
        log_probs: Of the policy in training; carries the gradient.
        old_log_probs: Of the policy before this step's first update.
        engine_log_probs: Of the engine that sampled.
        advantages: Per token.
        mask: Bool; false tokens take no part.
        weights: From ``aggregation.sequence_weights`` over the whole minibatch.
        sequence_ids: int64, the sequence within the cut that a token belongs to, rising from 0.
        ref_log_probs: Of the reference model; ``None`` when there is none.
        entropy: Of the policy's distribution at each token, in nats; with gradient when it is a
            part of the loss. ``None``: not measured.
        policy_factors: What multiplies ``weights`` in the policy term alone; 0 leaves a token out
            of it. ``None``: 1 each.
        num_sequences: How many sequences the cut has; ``None``: counted, for which the host waits
            for a GPU.
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

    def masked(self, values: Tensor) -> Tensor:
        """``values`` where a token takes part, 0 elsewhere, with gradient 0 there."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def raw_log_ratio(self) -> Tensor:
        """``[r]`` log of the importance ratio, current over old policy; 0 at masked tokens."""
        return self.masked(self.log_probs - self.old_log_probs)

    def log_ratio(self) -> Tensor:
        """The log-ratio within ``±LOG_RATIO_LIMIT``; gradient 0 beyond.

        A token beyond has moved by a factor of 5e8. A gradient there would be that large, or, on
        the other side, 0 to within rounding, so the token says nothing and is left out of the
        gradient. It still counts in the loss and in the denominators.
        """
        return self.raw_log_ratio().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """``[r]`` mean of ``values`` over the unmasked tokens of each token's sequence."""
        n = self.num_sequences
        if n is None:
            n = int(self.sequence_ids.max()) + 1 if self.sequence_ids.numel() else 0
        zeros = torch.zeros(n, dtype=values.dtype, device=values.device)
        totals = zeros.index_add(0, self.sequence_ids, self.masked(values))
        counts = zeros.index_add(0, self.sequence_ids, self.mask.to(values.dtype))
        return (totals / counts.clamp(min=1))[self.sequence_ids]

    def token_advantages(self) -> Tensor:
        """``[r]`` advantages in the dtype of the log-probs, 0 at masked tokens."""
        return self.masked(self.advantages.to(self.log_probs.dtype))

    def token_weights(self) -> Tensor:
        """``[r]`` weights in the dtype of the log-probs, 0 at masked tokens."""
        return self.masked(self.weights.to(self.log_probs.dtype))


@dataclass(frozen=True)
class LossOutput:
    """The loss of a cut.

    Attributes:
        loss: Scalar: the sum of weights times token losses. Losses of the cuts of a minibatch add
            up to the minibatch's.
        token_losses: ``[r]``, before weighting, detached; 0 at masked tokens.
        metric_sums: Scalars (float64) that add up over cuts.
        metric_maxima: Scalars (float64) of which the largest over cuts counts.
        farthest: ``[2]`` float64: the place in the cut of the unmasked token whose ``|log-ratio|``
            is largest, and its log-ratio before the clamp; 0 and 0 for a cut without tokens.
            ``None``: not looked for.
        off_policy_masked: ``[r]`` bool, tokens that ``off_policy_mask_kl`` left out; ``None``:
            there is no such mask.
    """

    loss: Tensor
    token_losses: Tensor
    metric_sums: dict[str, Tensor]
    metric_maxima: dict[str, Tensor]
    farthest: Tensor | None = None
    off_policy_masked: Tensor | None = None


OptionsT = TypeVar("OptionsT", bound=Options)

# A loss maps inputs and options to the loss of each token ``[r]``, with gradient, and booleans
# ``[r]`` to count by name.
TokenLoss = Callable[[LossInputs, OptionsT], tuple[Tensor, dict[str, Tensor]]]
# Of the loss's own options, see ``Registry.options``.
PolicyLoss = Callable[[LossInputs, Any], LossOutput]


@dataclass(frozen=True)
class LossTraits:
    """What is true of a policy loss.

    Attributes:
        aggregations: Those that make the sum over tokens the objective of the loss's paper, the
            paper's own first; empty: any.
        bounds_ratio: It bounds what a token's importance ratio can do, as samples of older weights
            need it.
        of_sequences: A token's gradient reaches all tokens of its sequence.
        stops_gradient: Its gradient is by intent not that of its value.
    """

    aggregations: tuple[str, ...] = ()
    bounds_ratio: bool = True
    of_sequences: bool = False
    stops_gradient: bool = False


LOSSES: Registry[PolicyLoss, LossTraits] = Registry("algorithm.loss", LossTraits)


def policy_loss(
    name: str, options: type[OptionsT], traits: LossTraits | None = None
) -> Callable[[TokenLoss[OptionsT]], PolicyLoss]:
    """Decorator: makes a policy loss out of a function of tokens and files it under ``name``.

    Args:
        name: Of the loss, in the settings.
        options: What it may be told besides its inputs.
        traits: What is true of it.
    """

    def wrap(token_loss: TokenLoss[OptionsT]) -> PolicyLoss:
        def loss(inputs: LossInputs, given: OptionsT) -> LossOutput:
            losses, flags = token_loss(inputs, given)
            if losses.shape != inputs.log_probs.shape:
                raise ValueError(
                    f"algorithm.loss={name}: returned losses of shape {list(losses.shape)} for "
                    f"{inputs.log_probs.numel()} tokens: one for each is needed"
                )
            losses = inputs.masked(losses)
            total = (inputs.token_weights() * losses).sum()
            sums = {"weighted/policy_loss": total.detach().double()}
            for key, flag in flags.items():
                sums[f"token/{key}"] = (flag & inputs.mask).sum().double()
            return LossOutput(total, losses.detach(), sums, {})

        loss.__name__ = token_loss.__name__
        loss.__doc__ = token_loss.__doc__
        loss.__module__ = token_loss.__module__
        LOSSES.register(name, options, traits)(loss)
        return loss

    return wrap


def metric_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Totals over all cuts of a minibatch, divided by what their names say.

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
