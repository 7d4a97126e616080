"""One step on one rank: its shard stays here from the log-probs to the update.

Log-probs, values, corrections and advantages are computed where the sequences are. Only figures go
back to the driver: sums that add up, and a few numbers for each sequence. What needs the whole step
is added up over the data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import UpdateResult, UpdateSettings, ValueUpdateSettings
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.advantages import ADVANTAGES, SequenceAdvantages, token_advantages
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.algorithms.alignment import Alignment, token_lags
from rlmath.algorithms.correction import CorrectionConfig, CorrectionTotals, correct
from rlmath.algorithms.distillation import DistillTotals, distill
from rlmath.algorithms.entropy import top_entropy_mask
from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.algorithms.peers import Peers
from rlmath.batching.shards import Shard
from rlmath.model.fp8 import NOTHING, InFp8
from rlmath.types import TrainingBatch
from rlmath.weights.sequence_fingerprints import SequenceFingerprints


class Policy(Peers, Protocol):
    """What a step needs of the rank's policy; see ``MegatronActor``."""

    is_last_stage: bool
    reports: bool

    def shard_log_probs(
        self,
        shard: Shard,
        reference: bool = False,
        noise_seed: int | None = None,
        keep_routes: bool = False,
        in_fp8: InFp8 = NOTHING,
    ) -> TokenValues | None: ...

    def update_shard(
        self, shard: Shard, settings: UpdateSettings, traced: Collection[int] = ()
    ) -> UpdateResult: ...


@dataclass(frozen=True)
class GaeSettings:
    """See ``ValueConfig``."""

    estimator: str
    gamma: float
    lam: float
    whiten: bool


@dataclass(frozen=True)
class DistillSettings:
    """See ``AlgorithmConfig.distill_coef``."""

    coef: float
    clip: float


@dataclass(frozen=True)
class TokenSettings:
    """What becomes of a step's tokens between the log-probs and the update.

    Attributes:
        old_is_engine: The rollout log-probs are those of the old policy.
        correction: Against the mismatch, with ``auto`` resolved; ``None``: none.
        entropy_top_share: Of the tokens of the loss, those in the policy term.
        kl_coef: Weight of a KL in the reward; ``None``: there is none.
        gae: Advantages come from values; ``None``: from rewards alone.
        distill: What a teacher adds to the advantages; ``None``: there is none.
    """

    old_is_engine: bool = False
    correction: CorrectionConfig | None = None
    entropy_top_share: float = 1.0
    kl_coef: float | None = None
    gae: GaeSettings | None = None
    distill: DistillSettings | None = None


@dataclass(frozen=True)
class TokenFigures:
    """What a rank reports of :meth:`RankStep.finish`.

    Attributes:
        any_advantage: Whether any advantage is not 0.
        fingerprints: Of the sequences' values that the update reads.
        correction: ``None``: nothing was corrected.
        distill: ``None``: there is no teacher.
    """

    any_advantage: bool
    fingerprints: SequenceFingerprints
    correction: CorrectionTotals | None = None
    distill: DistillTotals | None = None

    @classmethod
    def joined(cls, parts: Sequence[TokenFigures]) -> TokenFigures:
        """Those of all ranks together."""
        totals = [one.correction for one in parts if one.correction is not None]
        distilled = [one.distill for one in parts if one.distill is not None]
        return cls(
            any(one.any_advantage for one in parts),
            SequenceFingerprints.joined([one.fingerprints for one in parts]),
            functools.reduce(operator.add, totals) if totals else None,
            functools.reduce(operator.add, distilled) if distilled else None,
        )


@dataclass(frozen=True)
class Moments:
    """Sums of values and returns over tokens of the loss; those of several ranks add up.

    Attributes:
        count: Tokens.
        value_sum: Of the values.
        return_sum: Of the returns.
        return_square_sum: Of the returns' squares.
        error_sum: Of return less value.
        error_square_sum: Of its square.
    """

    count: float = 0.0
    value_sum: float = 0.0
    return_sum: float = 0.0
    return_square_sum: float = 0.0
    error_sum: float = 0.0
    error_square_sum: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Moments(*(one + two for one, two in pairs))


class RankStep:
    """A step of this rank.

    Args:
        policy: The rank's policy.
        value_model: The rank's value model; ``None``: there is none.
        shard: The rank's sequences.
    """

    def __init__(self, policy: Policy, value_model: Any, shard: Shard) -> None:
        self._policy, self._value_model = policy, value_model
        self.shard = shard
        self._entropy: Tensor | None = None
        # The weights version that the old log-probs are of.
        self._now: int | None = None

    def run_passes(self, plan: StepPlan, now: int) -> Alignment | None:
        """Run the forward passes of the plan: old policy, reference, values.

        Args:
            plan: Of the step.
            now: The actor's weights version.

        Returns:
            On the rank that reports, how the old log-probs agree with the rollout log-probs;
            ``None`` without that pass.
        """
        alignment = self._old_log_probs(now, plan.stale_kv) if plan.old_log_probs else None
        if plan.reference:
            found = self._policy.shard_log_probs(self.shard, reference=True)
            self.shard = self.shard.with_values(ref_log_probs=self._or_nothing(found))
        if plan.values:
            values = self._value_model.shard_values(self.shard)
            own = self._nothing() if values is None else values
            self.shard = self.shard.with_values(values=own)
        return alignment

    def _old_log_probs(self, now: int, stale_kv: bool) -> Alignment | None:
        """Compute the old policy's log-probs.

        Args:
            now: The actor's weights version.
            stale_kv: See :meth:`Alignment.of`.

        Returns:
            On the rank that reports, how they agree with the rollout log-probs.
        """
        found = self._policy.shard_log_probs(self.shard, keep_routes=True)
        self.shard = self.shard.with_values(old_log_probs=self._or_nothing(found))
        if found is None:
            return None
        self._entropy, self._now = found.entropy, now
        return self._alignment(found, self.shard.batch, self.shard.places, now, stale_kv)

    def finish(
        self, settings: TokenSettings, advantages: SequenceAdvantages | None
    ) -> TokenFigures | None:
        """Compute policy factors and advantages, from all that came before.

        Args:
            settings: What to compute.
            advantages: Of the shard's sequences, from rewards alone; ``None`` with ``gae``.

        Returns:
            On the rank that reports.
        """
        batch = self.shard.batch
        if settings.old_is_engine:
            batch = dataclasses.replace(batch, old_log_probs=batch.engine_log_probs)
        if not self._policy.is_last_stage:
            nothing = self._nothing()
            returns = nothing if settings.gae else None
            batch = dataclasses.replace(batch, advantages=nothing, returns=returns)
            self.shard = dataclasses.replace(self.shard, batch=batch)
            return None
        batch, totals = self._with_factors(batch, settings)
        batch = self._with_advantages(batch, settings, advantages)
        batch, distilled = self._with_teacher(batch, settings.distill)
        assert batch.advantages is not None
        self.shard = dataclasses.replace(self.shard, batch=batch)
        if not self._policy.reports:
            return None
        return TokenFigures(bool(batch.advantages.any()), self._fingerprints(), totals, distilled)

    def update(
        self, settings: UpdateSettings, now: int, traced: Collection[int] = ()
    ) -> tuple[UpdateResult | None, Alignment | None]:
        """Optimizer steps of the policy.

        Args:
            settings: The algorithm.
            now: The weights version before the update.
            traced: Places in the step of sequences whose tokens are to be traced.

        Returns:
            On the rank that reports, the result, and how the log-probs of the first minibatch
            agreed with the rollout log-probs; ``None`` where :meth:`run_passes` has said it.
        """
        result = self._policy.update_shard(self.shard, settings, traced)
        first, alignment = result.first, None
        if not self._policy.reports:
            return None, None
        if first is not None and self._entropy is None:
            share = next(self.shard.shares())
            alignment = self._alignment(first, share.batch, share.places, now)
            values = {"old_log_probs": first.log_probs}
            found = SequenceFingerprints.of(share.places, share.batch.response_lengths, values)
            result = dataclasses.replace(result, fingerprints=found)
        return dataclasses.replace(result, first=None), alignment

    def update_values(
        self, settings: ValueUpdateSettings
    ) -> tuple[list[dict[str, float]], Moments, dict[str, int], list[str]] | None:
        """Optimizer steps of the value model.

        Returns:
            On the rank that reports, metrics of each minibatch, what values and returns were
            before, the fingerprint of each tensor of the value model after it, and the tensors
            that are as they were.
        """
        self._value_model.load_parameters()
        before = self._value_model.weight_prints()
        metrics = self._value_model.update_shard(self.shard, settings)
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
        return metrics, moments, prints, unchanged

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
        self,
        found: TokenValues,
        batch: TrainingBatch,
        places: Tensor,
        now: int,
        stale_kv: bool = False,
    ) -> Alignment | None:
        if not self._policy.reports:
            return None
        return Alignment.of_batch(
            batch, found.log_probs, found.entropy, now, places=places, stale_kv=stale_kv
        )

    def _with_factors(
        self, batch: TrainingBatch, settings: TokenSettings
    ) -> tuple[TrainingBatch, CorrectionTotals | None]:
        """Add the factors of the policy term: mismatch correction and top entropy."""
        factors = totals = None
        if settings.correction is not None:
            assert batch.old_log_probs is not None
            found = correct(
                batch.old_log_probs,
                batch.engine_log_probs,
                batch.loss_mask,
                batch.response_lengths,
                settings.correction,
                None if self._now is None else token_lags(batch, self._now),
            )
            totals = found.totals
            factors = found.weights.float() if settings.correction.is_on else None
        if settings.entropy_top_share < 1:
            assert self._entropy is not None
            share = settings.entropy_top_share
            keep = top_entropy_mask(self._entropy, batch.loss_mask, share, self._policy).float()
            factors = keep if factors is None else keep * factors
        return dataclasses.replace(batch, policy_factors=factors), totals

    def _with_advantages(
        self,
        batch: TrainingBatch,
        settings: TokenSettings,
        advantages: SequenceAdvantages | None,
    ) -> TrainingBatch:
        kl = None
        if settings.kl_coef is not None:
            old, reference = batch.old_log_probs, batch.ref_log_probs
            assert old is not None and reference is not None
            kl = kl_estimate("k1", old, reference, old)
        if settings.gae is not None:
            return self._with_gae(batch, settings.gae, kl, settings.kl_coef or 0.0)
        assert advantages is not None
        penalty = None
        if kl is not None:
            cost = kl_in_reward(kl, batch.loss_mask, batch.response_lengths, 1.0)
            penalty = (settings.kl_coef or 0.0) * cost
        found = token_advantages(
            advantages, batch.response_lengths, batch.loss_mask, penalty, self._policy
        )
        return dataclasses.replace(batch, advantages=found)

    def _with_teacher(
        self, batch: TrainingBatch, settings: DistillSettings | None
    ) -> tuple[TrainingBatch, DistillTotals | None]:
        """Add what the teacher says, last: its unit is nats, and no whitening changes it."""
        if settings is None:
            return batch, None
        assert batch.advantages is not None and batch.old_log_probs is not None
        assert batch.teacher_log_probs is not None
        found = distill(
            batch.old_log_probs,
            batch.teacher_log_probs,
            batch.loss_mask,
            batch.response_lengths,
            coef=settings.coef,
            clip=settings.clip,
        )
        return dataclasses.replace(
            batch, advantages=batch.advantages + found.advantages
        ), found.totals

    def _with_gae(
        self, batch: TrainingBatch, settings: GaeSettings, kl: Tensor | None, kl_coef: float
    ) -> TrainingBatch:
        """Add advantages and returns from values.

        A sequence's reward is at its last token, also when the response was truncated: nothing is
        bootstrapped after it. A KL in the reward is a cost at each token.
        """
        assert batch.values is not None
        rewards = torch.zeros_like(batch.values)
        rewards[torch.cumsum(batch.response_lengths, 0) - 1] = batch.rewards
        if kl is not None:
            rewards -= kl_coef * torch.where(batch.loss_mask, kl, 0.0)
        advantages, returns = ADVANTAGES.get(settings.estimator)(
            rewards,
            batch.values,
            batch.response_lengths,
            gamma=settings.gamma,
            lam=settings.lam,
        )
        if settings.whiten:
            mask = batch.loss_mask
            advantages = whiten(advantages.double(), mask, peers=self._policy).float()
        return dataclasses.replace(batch, returns=returns, advantages=advantages)

    def _or_nothing(self, found: TokenValues | None) -> Tensor:
        return self._nothing() if found is None else found.log_probs

    def _nothing(self) -> Tensor:
        """``[R]`` zeros of one number's memory, where no loss is computed."""
        return torch.zeros(1).expand(self.shard.batch.loss_mask.numel())
