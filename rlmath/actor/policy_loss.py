"""The policy's loss of a micro-batch, and the combination of a minibatch's micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.actor.loss_fields import LossFields
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.plan import StepPlan
from rlmath.actor.schedule import OnLogProbs
from rlmath.actor.second_gradient import second_gradients
from rlmath.actor.sequence_report import SequenceReport, sums_of_sequences
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.alignment import token_lags
from rlmath.algorithms.losses import LossInputs, LossOutput
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.off_policy import OffPolicyTotals
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share
from rlmath.types import TrainingBatch
from rlmath.weights.sequence_fingerprints import token_digests


@dataclass(frozen=True)
class MetricNames:
    """Names of a policy loss's metrics, which a rank without the last stage needs too."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]

    @classmethod
    def of(cls, objective: ObjectiveSettings, with_reference: bool) -> MetricNames:
        """The names, from running the objective on one token: they depend only on settings."""
        one = torch.zeros(1)
        inputs = LossInputs(
            log_probs=one,
            old_log_probs=one,
            engine_log_probs=one,
            advantages=one,
            mask=torch.ones(1, dtype=torch.bool),
            weights=one,
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            ref_log_probs=one if with_reference else None,
            entropy=one,
        )
        output = policy_objective(inputs, objective)
        return cls(tuple(sorted(output.metric_sums)), tuple(sorted(output.metric_maxima)))


def policy_loss(
    fields: LossFields, settings: ObjectiveSettings
) -> OnLogProbs[tuple[LossOutput, TokenValues]]:
    """The policy's objective of a micro-batch, for ``of_log_probs``. Stays on the device.
    ``fields``: named as in ``LossInputs``; without ``old_log_probs`` the current policy is its own
    old policy."""

    def objective(
        one: PackedMicroBatch, log_probs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, tuple[LossOutput, TokenValues]]:
        given = {"old_log_probs": log_probs.detach(), "ref_log_probs": None} | fields.of(one)
        inputs = LossInputs(
            log_probs=log_probs,
            sequence_ids=one.sequence_ids,
            num_sequences=one.num_sequences,
            entropy=entropy if settings.entropy_coef else entropy.detach(),
            **given,  # type: ignore[arg-type]
        )
        output = policy_objective(inputs, settings)
        count = one.num_sequences or 0
        sums = sums_of_sequences(inputs, count)
        kept = TokenValues(one.response_rows, log_probs.detach(), entropy.detach(), sums)
        # output.loss references the graph; the kept outputs must not.
        return output.loss, (_detach(output), kept)

    return objective


def sequence_report(
    index: int,
    share: Share,
    outcomes: Sequence[tuple[LossOutput, TokenValues]],
    values: TokenValues,
    plan: StepPlan,
) -> SequenceReport:
    """Contributions of a rank's sequences to the loss and their gradients; on ranks of the last
    stage, after the backward pass.

    Args:
        values: Their values together, on the CPU.
    """
    batch, order = share.batch, [i for one in share.micro_batches for i in one.sequences]
    digests = token_digests(batch.tokens, batch.prompt_lengths, batch.sequence_lengths)
    sums = [v.sequence_sums for _, v in outcomes if v.sequence_sums is not None]
    log_probs = torch.zeros(batch.loss_mask.numel())
    log_probs[values.response_rows] = values.log_probs
    return SequenceReport(
        torch.full((len(order),), index),
        share.places[order],
        digests[order],
        torch.cat(sums).cpu(),
        second_gradients(share, log_probs, plan)[order],
    )


def keep_values(
    one: PackedMicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, TokenValues]:
    return log_probs.sum(), TokenValues(one.response_rows, log_probs, entropy)


def stack_values(values: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> Tensor:
    """``[micro-batches, names]`` on the CPU, in one copy."""
    return torch.stack([torch.stack([one[name] for name in names]) for one in values]).cpu()


def _detach(output: LossOutput) -> LossOutput:
    return dataclasses.replace(output, loss=output.loss.detach())


def off_policy(
    outcomes: Sequence[tuple[LossOutput, TokenValues]], batch: TrainingBatch
) -> dict[int, OffPolicyTotals]:
    """Effect of ``off_policy_mask_kl`` on a minibatch's tokens; empty without it."""
    rows = [values.response_rows for _, values in outcomes]
    masks = [one.off_policy_masked for one, _ in outcomes if one.off_policy_masked is not None]
    if not masks:
        return {}
    mask = batch.loss_mask
    left_out = torch.zeros(mask.numel(), dtype=torch.bool)
    left_out[torch.cat(rows)] = torch.cat(masks).cpu()
    # Versions count from 0, and tokens n versions older have version -n.
    return OffPolicyTotals.by_value(-token_lags(batch, 0), mask, mask & left_out)


def concatenate(values: Sequence[TokenValues]) -> TokenValues:
    """Values of all micro-batches, on the CPU."""
    return TokenValues(
        torch.cat([v.response_rows for v in values]),
        torch.cat([v.log_probs for v in values]).cpu(),
        torch.cat([v.entropy for v in values]).cpu(),
    )
