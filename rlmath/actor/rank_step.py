"""One step on one rank, whose shard stays here from the log-probs to the update.

Log-probs, values, corrections and advantages are computed where the sequences are. The driver gets
only figures: sums that add up, and a few numbers per sequence. Quantities of the whole step are
summed over the data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import UpdateResult
from rlmath.actor.step_probe import StepFindings
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.advantages import ADVANTAGES, SequenceAdvantages, token_advantages
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.algorithms.alignment import Alignment, token_lags
from rlmath.algorithms.correction import CorrectionTotals, correct
from rlmath.algorithms.distillation import DistillTotals, distill
from rlmath.algorithms.entropy import top_entropy_mask
from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.batching.shards import Shard
from rlmath.types import TrainingBatch
from rlmath.weights.sequence_fingerprints import SequenceFingerprints

if TYPE_CHECKING:
    from rlmath.actor.policy import MegatronActor


@dataclass(frozen=True)
class TokenFigures:
    """A rank's results of :meth:`RankStep.add_advantages`."""

    any_advantage: bool  # Whether any advantage is not 0.
    # Fingerprints of the sequences' values that the update reads.
    fingerprints: SequenceFingerprints
    correction: CorrectionTotals | None = None  # Totals of the correction, if any.
    distill: DistillTotals | None = None  # Totals of distillation, if there is a teacher.

    @classmethod
    def join(cls, parts: Sequence[TokenFigures]) -> TokenFigures:
        totals = [one.correction for one in parts if one.correction is not None]
        distilled = [one.distill for one in parts if one.distill is not None]
        return cls(
            any(one.any_advantage for one in parts),
            SequenceFingerprints.join([one.fingerprints for one in parts]),
            functools.reduce(operator.add, totals) if totals else None,
            functools.reduce(operator.add, distilled) if distilled else None,
        )


@dataclass(frozen=True)
class Moments:
    """Sums of values and returns over tokens of the loss; sums of several ranks add up."""

    count: float = 0.0  # Number of tokens.
    value_sum: float = 0.0  # Sum of values.
    return_sum: float = 0.0  # Sum of returns.
    return_square_sum: float = 0.0  # Sum of squared returns.
    error_sum: float = 0.0  # Sum of return minus value.
    error_square_sum: float = 0.0  # Sum of squared errors.

    def __add__(self, other: Moments) -> Moments:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Moments(*(one + two for one, two in pairs))


@dataclass(frozen=True)
class ValueResult:
    minibatches: list[dict[str, float]]  # Metrics of each minibatch.
    moments: Moments  # Moments of values and returns before the update.
    fingerprints: dict[str, int]  # Fingerprint of each tensor of the value model after the update.
    unchanged: list[str]  # The tensors that did not change.
    step_findings: StepFindings = ()  # See UpdateResult.


@dataclass(frozen=True)
class StepResult:
    """The result of a step after its forward passes."""

    tokens: TokenFigures | None  # Figures of its tokens; None: the batch came with its advantages.
    values: ValueResult | None  # The value model's update, if there was one.
    policy: UpdateResult | None  # The policy's update, if there was one.

    @classmethod
    def join(cls, parts: Sequence[StepResult]) -> StepResult:
        tokens = [one.tokens for one in parts if one.tokens is not None]
        values = [one.values for one in parts if one.values is not None]
        policy = [one.policy for one in parts if one.policy is not None]
        moments = functools.reduce(operator.add, [one.moments for one in values], Moments())
        return cls(
            TokenFigures.join(tokens) if tokens else None,
            dataclasses.replace(values[0], moments=moments) if values else None,
            UpdateResult.join(policy) if policy else None,
        )


# Fields of ``TrainingBatch`` that the forward passes fill in.
FIELDS = {"old": "old_log_probs", "reference": "ref_log_probs", "values": "values"}


class RankStep:
    def __init__(self, policy: MegatronActor, value_model: Any, shard: Shard) -> None:
        self._policy, self._value_model = policy, value_model
        self.shard = shard
        # Entropy of the old policy.
        self._entropy: Tensor | None = None

    def run_passes(self, plan: StepPlan) -> Alignment | None:
        """Run the forward passes of the plan. Returns agreement of the old log-probs with the
        rollout log-probs, on the rank that reports; ``None`` without that pass."""
        alignment = None
        for name in plan.passes:
            if name == "values":
                values: Tensor | None = self._value_model.shard_values(self.shard)
            else:
                found = self._policy.shard_log_probs(self.shard, name)
                values = None if found is None else found.log_probs
                if name == "old" and found is not None:
                    self._entropy = found.entropy
                    alignment = self._alignment(found, self.shard.batch, self.shard.places, plan)
            given = self._nothing() if values is None else values
            self.shard = self.shard.with_values(**{FIELDS[name]: given})
        return alignment

    def add_advantages(
        self, plan: StepPlan, advantages: SequenceAdvantages | None
    ) -> TokenFigures | None:
        """Compute policy factors and advantages from the passes. ``plan``: the step's plan.
        ``advantages``: advantages of the shard's sequences, from rewards alone; ``None`` with a
        value model. Returns the figures, on the rank that reports."""
        batch = self.shard.batch
        if plan.old_is_engine:
            batch = dataclasses.replace(batch, old_log_probs=batch.engine_log_probs)
        if not self._policy.is_last_stage:
            nothing = self._nothing()
            returns = nothing if plan.values else None
            batch = dataclasses.replace(batch, advantages=nothing, returns=returns)
            self.shard = dataclasses.replace(self.shard, batch=batch)
            return None
        batch, totals = self._with_factors(batch, plan)
        batch = self._with_advantages(batch, plan, advantages)
        batch, distilled = self._with_teacher(batch, plan)
        assert batch.advantages is not None
        self.shard = dataclasses.replace(self.shard, batch=batch)
        if not self._policy.reports:
            return None
        return TokenFigures(bool(batch.advantages.any()), self._fingerprints(), totals, distilled)

    def update(self, plan: StepPlan) -> UpdateResult | None:
        """Run the policy's optimizer steps. Returns the result, on the rank that reports."""
        result = self._policy.update_shard(self.shard, plan)
        first = result.first
        if not self._policy.reports:
            return None
        if first is not None and self._entropy is None:
            share = next(self.shard.shares())
            values = {"old_log_probs": first.log_probs}
            result = dataclasses.replace(
                result,
                alignment=self._alignment(first, share.batch, share.places, plan),
                fingerprints=SequenceFingerprints.of(
                    share.places, share.batch.response_lengths, values
                ),
            )
        return dataclasses.replace(result, first=None)

    def update_values(self, plan: StepPlan) -> ValueResult | None:
        """Run the value model's optimizer steps. Returns the result, on the rank that reports."""
        self._value_model.load_parameters()
        before = self._value_model.weight_prints()
        metrics = self._value_model.update_shard(self.shard, plan)
        prints = self._value_model.weight_prints()
        unchanged = [name for name, one in prints.items() if before[name] == one]
        batch = self.shard.batch
        if not self._policy.reports:
            return None
        assert batch.values is not None and batch.returns is not None
        values, returns = (x[batch.loss_mask].double() for x in (batch.values, batch.returns))
        errors = returns - values
        sums = (values, returns, returns.square(), errors, errors.square())
        moments = Moments(float(values.numel()), *(float(x.sum()) for x in sums))
        findings = self._value_model.step_findings
        return ValueResult(metrics, moments, prints, unchanged, findings)

    def _fingerprints(self) -> SequenceFingerprints:
        batch = self.shard.batch
        names = (
            *("old_log_probs", "ref_log_probs", "teacher_log_probs", "values"),
            *("policy_factors", "advantages"),
        )
        return SequenceFingerprints.of(
            self.shard.places,
            batch.response_lengths,
            {name: getattr(batch, name) for name in names},
        )

    def _alignment(
        self, found: TokenValues, batch: TrainingBatch, places: Tensor, plan: StepPlan
    ) -> Alignment | None:
        if not self._policy.reports:
            return None
        return Alignment.of_batch(
            batch, found.log_probs, found.entropy, plan.now, places=places, stale_kv=plan.stale_kv
        )

    def _with_factors(
        self, batch: TrainingBatch, plan: StepPlan
    ) -> tuple[TrainingBatch, CorrectionTotals | None]:
        """Add the factors of the policy term: mismatch correction and top entropy."""
        factors = totals = None
        if plan.correction is not None:
            assert batch.old_log_probs is not None
            found = correct(
                batch.old_log_probs,
                batch.engine_log_probs,
                batch.loss_mask,
                batch.response_lengths,
                plan.correction,
                None if self._entropy is None else token_lags(batch, plan.now),
            )
            totals = found.totals
            factors = found.weights.float() if plan.correction.is_on else None
        if plan.entropy_top_share < 1:
            assert self._entropy is not None
            keep = top_entropy_mask(
                self._entropy, batch.loss_mask, plan.entropy_top_share, self._policy
            ).float()
            factors = keep if factors is None else keep * factors
        return dataclasses.replace(batch, policy_factors=factors), totals

    def _with_advantages(
        self, batch: TrainingBatch, plan: StepPlan, advantages: SequenceAdvantages | None
    ) -> TrainingBatch:
        kl = None
        if plan.kl_in_reward is not None:
            old, reference = batch.old_log_probs, batch.ref_log_probs
            assert old is not None and reference is not None
            one = plan.objective
            kl = kl_estimate(one.kl_estimator, old, reference, old, one.kl_options)
        if plan.values:
            return self._with_gae(batch, plan, kl)
        assert advantages is not None
        penalty = None
        if kl is not None:
            cost = kl_in_reward(kl, batch.loss_mask, batch.response_lengths, 1.0)
            penalty = (plan.kl_in_reward or 0.0) * cost
        found = token_advantages(
            advantages, batch.response_lengths, batch.loss_mask, penalty, self._policy
        )
        return dataclasses.replace(batch, advantages=found)

    def _with_teacher(
        self, batch: TrainingBatch, plan: StepPlan
    ) -> tuple[TrainingBatch, DistillTotals | None]:
        """Add the teacher's signal, last: its unit is nats, and whitening does not change it."""
        if not plan.distill_coef:
            return batch, None
        assert batch.advantages is not None and batch.old_log_probs is not None
        assert batch.teacher_log_probs is not None
        found = distill(
            batch.old_log_probs,
            batch.teacher_log_probs,
            batch.loss_mask,
            batch.response_lengths,
            coef=plan.distill_coef,
            clip=plan.distill_clip,
        )
        return dataclasses.replace(
            batch, advantages=batch.advantages + found.advantages
        ), found.totals

    def _with_gae(self, batch: TrainingBatch, plan: StepPlan, kl: Tensor | None) -> TrainingBatch:
        """Add advantages and returns from values.

        A sequence's reward is at its last token, even if the response was truncated: nothing is
        bootstrapped after it. A KL in the reward is a cost at each token. After an
        observation, the model's next token follows its last one.
        """
        assert batch.values is not None
        own: Any = slice(None) if batch.model_mask is None else batch.model_mask
        lengths = batch.model_lengths
        rewards = torch.zeros_like(batch.values[own])
        rewards[torch.cumsum(lengths, 0) - 1] = batch.rewards
        if kl is not None:
            rewards -= (plan.kl_in_reward or 0.0) * torch.where(batch.loss_mask, kl, 0.0)[own]
        found = ADVANTAGES.get(plan.advantage)(
            rewards, batch.values[own], lengths, gamma=plan.gamma, lam=plan.lam
        )
        advantages, returns = torch.zeros_like(batch.values), torch.zeros_like(batch.values)
        advantages[own], returns[own] = found
        if plan.whiten_advantages:
            mask = batch.loss_mask
            advantages = whiten(advantages.double(), mask, peers=self._policy).float()
        return dataclasses.replace(batch, returns=returns, advantages=advantages)

    def _nothing(self) -> Tensor:
        """``[R]`` zeros in the memory of one number, where no loss is computed."""
        return torch.zeros(1).expand(self.shard.batch.loss_mask.numel())
