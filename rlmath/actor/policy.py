"""The policy on one Megatron rank: log-probs of a batch, and the update from it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlmath.actor.exchange import swap_parameters
from rlmath.actor.farthest import Farthest, say_clamped
from rlmath.actor.head import head_of
from rlmath.actor.lora import base_model
from rlmath.actor.loss_fields import LossFields
from rlmath.actor.model_base import RankModel
from rlmath.actor.observer import UpdateObserver
from rlmath.actor.passes import forward_passes
from rlmath.actor.plan import StepPlan
from rlmath.actor.policy_loss import (
    MetricNames,
    concatenate,
    keep_values,
    off_policy,
    policy_loss,
    sequence_report,
    stack_values,
)
from rlmath.actor.schedule import OnLogProbs, OnOutput, of_log_probs
from rlmath.actor.sequence_report import GRADIENT, SequenceReport
from rlmath.actor.settings import RENEWED, ActorSettings, UpdateResult
from rlmath.actor.slopes import Slopes
from rlmath.actor.step_probe import StepFinding
from rlmath.actor.token_traces import TokenTrace, traces_of
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.early_stop import Decision, decide
from rlmath.algorithms.losses import LossOutput, metric_means
from rlmath.algorithms.off_policy import OffPolicyTotals
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.algorithms.totals import add
from rlmath.batching.shards import Shard, Share, response_rows
from rlmath.checkpoint.optimizer_state import clear_optimizer_state
from rlmath.checkpoint.state import ModelState
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch, TrainingBatch
from rlmath.weights.tensor_prints import TensorPrints

if TYPE_CHECKING:
    from rlmath.actor.routing_replay import RoutingReplay

T = TypeVar("T")
# Updates from one in which a micro-batch's gradient is computed twice, and compared with slopes, to
# the next; the first is one. Where an update has two micro-batches, it costs as much as another.
AGAIN_EVERY = 256
# Rounding in bfloat16 may take a ratio out of a clip range that is narrower.
LEAST_CLIP = 0.05
# Result of each micro-batch of a minibatch, on ranks of the last stage.
Outcomes = list[tuple[LossOutput, TokenValues]]


@dataclass
class MinibatchResults:
    """Results of an update's minibatches so far; see :class:`UpdateResult`."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    stopped: dict[int, str] = field(default_factory=dict)
    clamped: dict[int, str] = field(default_factory=dict)
    first: TokenValues | None = None
    traces: list[TokenTrace] = field(default_factory=list)
    left_out: list[dict[int, OffPolicyTotals]] = field(default_factory=list)
    reports: list[SequenceReport] = field(default_factory=list)
    findings: list[StepFinding] = field(default_factory=list)


class MegatronActor(RankModel):
    """This process's part of the policy, and of its reference model."""

    def __init__(self, settings: ActorSettings, layout: Layout, platform: Platform) -> None:
        super().__init__(settings, layout, platform)
        # The reference's values of the trained weights, in host memory; None: there is no
        # reference, or it is the model without its adapters.
        self.reference: list[Tensor] | None = None
        self.observer: UpdateObserver | None = None  # Observes updates; None: none.
        self._prints: TensorPrints | None = None
        self.updates = 0  # So far.
        # Names of the last minibatch's metrics, and what they depend on.
        self._names: tuple[Any, MetricNames] | None = None
        # Without adapters the model is the reference.
        is_base = settings.lora is not None and settings.lora.init_from is None
        if settings.reference in RENEWED or (settings.reference == "frozen" and not is_base):
            # An average in bfloat16 would lose each step's small share.
            dtype = torch.float32 if settings.reference == "averaged" else None
            self.reference = [
                p.detach().to("cpu", dtype, copy=True) for p in self._trainable_parameters()
            ]
        # Records the routes of the old-log-prob pass, its own or the engine's, and replays them in
        # the update; None: no pass replays any.
        self.routing: RoutingReplay | None = None
        if settings.routing_replay != "none":
            from rlmath.actor.routing_replay import RoutingReplay

            self.routing = RoutingReplay(
                self.chunks,
                self.spec,
                layout,
                self.parallel,
                platform,
                from_engine=settings.routing_replay == "engine",
            )
        self.passes = forward_passes(self)  # Context managers of each forward pass, by its name.

    def _trainable_parameters(self) -> list[Tensor]:
        """Parameters that training changes and the reference lacks; adapters under LoRA."""
        everything = self.settings.lora is None
        return [p for p in self.module.parameters() if p.requires_grad or everything]

    def checkpoint_state(self) -> ModelState:
        state = super().checkpoint_state()
        kind = self.settings.reference
        if kind not in RENEWED:
            return state  # A frozen reference is read from the model's folder again.
        return dataclasses.replace(state, reference=self.reference, reference_kind=kind)

    # -- log-probs ------------------------------------------------------------------------------

    def log_probs(
        self, batch: TrainingBatch, name: str = "policy", seed: int = 0
    ) -> TokenValues | None:
        """Log-probs and entropies of the response tokens of a batch that all ranks have; ``name``
        and ``seed``: see ``shard_log_probs``. Returns this data-parallel rank's values on the rank
        that reports, else ``None``; rows count in the batch."""
        shard = self.shard_of(batch)
        found = self.shard_log_probs(shard, name, seed)
        if found is None or not self.reports:
            return None
        rows = response_rows(shard.places, batch.response_lengths)
        return dataclasses.replace(found, response_rows=rows)

    @torch.no_grad()
    def shard_log_probs(
        self, shard: Shard, name: str = "policy", seed: int = 0
    ) -> TokenValues | None:
        """Log-probs and entropies of the shard's response tokens.

        Args:
            name: Name of the forward pass; see :func:`rlmath.actor.passes.forward_passes`.
            seed: Seed of the pass's random draws.

        Returns:
            The values in the shard's order, on all ranks of the last stage; else ``None``.
        """
        share = shard.forward_share()
        if name == "old" and (self.spec.experts or self.settings.model.fp8 is not None):
            # The update's micro-batches: in others a MoE may choose other experts, and the update
            # replays this pass's routes; in FP8 the scales depend on what is packed together.
            share = shard.whole()
        micro_batches = self.micro_batches(share)
        self.load_parameters()  # The contexts below may read them.
        with contextlib.ExitStack() as stack:
            for around in self.passes[name]:
                stack.enter_context(around(shard, micro_batches, seed))
            values = self.forward(micro_batches, self._of_log_probs(keep_values))
        return concatenate(values) if self.is_last_stage else None

    @contextlib.contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Run the model with the reference's weights. The optimizer never sees them."""
        if self.settings.reference == "none":
            raise ValueError("there is no reference model: ActorSettings.reference is none")
        self.load_parameters()
        if self.reference is None:
            with base_model(self.adapters):
                yield
        else:
            with swap_parameters(self._trainable_parameters(), self.reference):
                yield

    @torch.no_grad()
    def renew_reference(self, share: float, clear_optimizer: bool = False) -> None:
        """Set the reference to ``(1 - share) reference + share policy``. ``share``: see
        :func:`rlmath.algorithms.kl_control.reference_weight`. ``clear_optimizer``: reset Adam's
        moments as well."""
        assert self.reference is not None
        self.load_parameters()
        for mine, parameter in zip(self.reference, self._trainable_parameters(), strict=True):
            mine.lerp_(parameter.detach().to("cpu", mine.dtype), share)
        if clear_optimizer:
            with self.device_state.optimizer_readable():
                clear_optimizer_state(self.optimizer)
            self.forget_steps()

    # -- update ---------------------------------------------------------------------------------

    def update(self, batch: TrainingBatch, plan: StepPlan, seed: int) -> UpdateResult:
        """Optimizer steps from a batch that all ranks have; ``seed``: of the split into
        minibatches."""
        return self.update_shard(self.shard_of(batch, plan, seed), plan)

    def update_shard(self, shard: Shard, plan: StepPlan) -> UpdateResult:
        """Optimizer steps from the ranks' shards of a step, one per minibatch.

        Without ``old_log_probs`` the current policy is its own old policy (the ratio is 1);
        that is exact for the first minibatch only, so ``plan.minibatches`` must be 1.

        Args:
            shard: With advantages; only ranks of the last stage read the values of tokens.

        Raises:
            ValueError: No advantages, several minibatches without old log-probs, or routing replay
                without the routes of a pass over this shard.
        """
        batch = shard.batch
        if batch.advantages is None:
            raise ValueError("the batch has no advantages; an update needs them")
        if batch.old_log_probs is None and plan.minibatches != 1:
            raise ValueError(
                f"{plan.minibatches} minibatches need old_log_probs: after the first one, the "
                "policy is no longer the one that sampled"
            )
        measured = None
        if self.routing is not None:
            self.routing.check(shard)
            if plan.routing_mismatch:
                measured = self.routing.measured_minibatch(plan.minibatches)
        self._prints = self._prints or self.tensor_prints()
        schedule_steps = int(self.scheduler.num_steps)
        done = MinibatchResults()
        for index, minibatch in enumerate(shard.shares()):
            if done.stopped and plan.early_stop_rest:
                done.stopped[index] = f"minibatch {min(done.stopped)} was (early_stop_rest)"
                continue
            begin = sum(map(len, shard.counts[:index]))
            self._update_minibatch(minibatch, plan, begin, index, index == measured, done)
        self.updates += 1
        return UpdateResult(
            done.metrics,
            done.stopped,
            done.first,
            done.clamped,
            routing={} if self.routing is None else self.routing.finish(),
            traces=tuple(done.traces),
            gradients=self._prints.take(),
            off_policy=reduce(add, done.left_out, {}),
            sequences=SequenceReport.join(done.reports) if done.reports else None,
            schedule_steps=schedule_steps,
            step_findings=self.worst_findings(done.findings),
        )

    def _update_minibatch(
        self,
        minibatch: Share,
        plan: StepPlan,
        begin: int,
        index: int,
        measures_routing: bool,
        done: MinibatchResults,
    ) -> None:
        """The gradient of a minibatch and its optimizer step, added to what is done. ``begin``:
        where its micro-batches begin in the shard. ``measures_routing``: compare its log-probs with
        those of freely routed tokens."""
        free = self._freely_routed(minibatch) if measures_routing else None
        again = self._compute_again(minibatch, plan) if index == 0 else None
        slopes = self._compare_slopes(minibatch) if index == 0 else StepFinding()
        outcomes = self._backward(minibatch, plan, begin, self.observer)
        if again is not None and not self._gradient_finding.kind:
            assert self.gradient_shares is not None
            self._gradient_finding = self.gradient_shares.differs_from(*again)
        one, decision, farthest = self._step(minibatch, outcomes, plan, index)
        values = concatenate([v for _, v in outcomes]) if self.is_last_stage else None
        if free is not None and self.routing is not None and values is not None:
            self.routing.add_mismatch(minibatch.batch, values.log_probs, free.log_probs)
        done.first = values if index == 0 else done.first
        if self.reports:
            assert values is not None
            done.left_out.append(off_policy(outcomes, minibatch.batch))
            done.reports.append(sequence_report(index, minibatch, outcomes, values, plan))
        if plan.traced and values is not None:
            done.traces += traces_of(
                minibatch, values, plan.objective, plan.traced, index, decision.discard
            )
        if one["log_ratio_clamped_count"]:
            done.clamped[index] = say_clamped(one, farthest)
        done.metrics.append(one)
        # A slope comes last: what else is found is more exact.
        done.findings.append(self.step_finding if self.step_finding.kind else slopes)
        if decision.kind == "early_stop":
            done.stopped[index] = decision.reason

    def _step(
        self, share: Share, outcomes: Outcomes, plan: StepPlan, index: int
    ) -> tuple[dict[str, float], Decision, Farthest]:
        """One optimizer step from the gradient that is there, unless it has to be discarded.
        Returns its metrics, what became of it, and the farthest token.

        Args:
            share: This rank's sequences of the minibatch.
            outcomes: From :meth:`_backward`.
            index: Index of the minibatch, from 0.
        """
        settings = (plan.objective, share.batch.ref_log_probs is not None)
        if self._names is None or self._names[0] != settings:
            self._names = settings, MetricNames.of(*settings)
        names = self._names[1]
        sums, maxima, farthest = self._totals(share, outcomes, names)
        signals = [_signal(values) for _, values in outcomes]
        self.check_given(signals, len(share.micro_batches))
        grad_norm = self.gradient_norm()
        assert self._prints is not None
        self._prints.add_gradient(index)
        if self.observer is not None:
            self.device_state.load("optimizer")  # It reads the main parameters.
            self.observer.record_gradient(self.optimizer)
        decision = decide({**sums, "gradient norm": grad_norm}, plan.early_stop_ratio)
        lr = self.finish_minibatch(decision.discard)
        metrics = metric_means(sums) | maxima
        metrics["grad_norm"] = grad_norm
        metrics["lr"] = lr
        metrics["discarded"] = float(decision.discard)
        return metrics, decision, farthest

    def _compute_again(self, share: Share, plan: StepPlan) -> tuple[list[Tensor], int] | None:
        """In the first update and every 256th, the gradient of one micro-batch by its sequences
        alone, packed in two parts, at the elements that the next pass looks at. Collective.

        Not of a model with experts, whose routers may choose otherwise when products round
        otherwise, not in FP8, whose scales depend on what is packed together, and not where
        rounding decides which sequences are left out, or is all of the gradient: that of a KL to
        itself, where no sequence has an advantage. Returns elements of each matrix, and the
        micro-batch; ``None``: not in this update.
        """
        number, rest = divmod(self.updates, AGAIN_EVERY)
        if rest or self.spec.experts or self.settings.model.fp8 is not None:
            return None
        if _is_narrow(plan.objective) or plan.objective.kl_coef > 0:
            return None
        assert self.gradient_shares is not None
        number %= len(share.micro_batches)
        members, lengths = share.micro_batches[number].sequences, share.batch.sequence_lengths
        half = (len(members) + 1) // 2
        parts = [
            MicroBatch(part, int(lengths[list(part)].sum()))
            for part in (members[:half], members[half:])
        ]
        if len(self.chunks) > 1:
            # With interleaved stages Megatron takes a multiple of their number.
            parts += [MicroBatch((), 0)] * (-len(parts) % self.layout.pipeline_parallel)
        self._backward(dataclasses.replace(share, micro_batches=parts), plan, 0)
        self.gradient_shares.repeat()
        return self.gradient_shares.totals(), number

    def _compare_slopes(self, share: Share) -> StepFinding:
        """In the same updates, the gradient of a sequence of each data-parallel rank with the slope
        of its log-probs; see ``slopes.py``. Collective. Not of a model with experts, as a small
        move of the weights changes routes, and not in FP8, which rounds too much."""
        if self.updates % AGAIN_EVERY or self.spec.experts or self.settings.model.fp8 is not None:
            return StepFinding()
        assert self.gradient_shares is not None
        lengths = share.batch.sequence_lengths
        members = sorted((int(lengths[i]), i) for one in share.micro_batches for i in one.sequences)
        parts = [MicroBatch((), 0)] * (self.layout.pipeline_parallel if len(self.chunks) > 1 else 1)
        if members:
            length, own = members[len(members) // 2]
            parts[0] = MicroBatch((own,), length)
        packed = self.micro_batches(dataclasses.replace(share, micro_batches=parts))
        on_output = self._of_log_probs(lambda _, found, entropy: (found.sum(), found.detach()))

        def run() -> tuple[float, int]:
            found = self.forward(packed, on_output)
            kept = found if self.reports else []
            return sum(float(x.double().sum()) for x in kept), sum(x.numel() for x in kept)

        self.forward_backward(packed, on_output)
        self.gradient_shares.repeat()
        dtype = self.settings.model.dtype
        return Slopes(self.chunks, self.optimizer, dtype, run).finding()

    def forget_steps(self) -> None:
        super().forget_steps()
        self.updates = 0  # Whatever is compared in the first update is compared again.

    def _backward(
        self, share: Share, plan: StepPlan, begin: int, observer: UpdateObserver | None = None
    ) -> Outcomes:
        """The gradient of a minibatch's loss, summed over micro-batches and ranks. ``begin``: where
        its micro-batches begin in the shard. ``observer``: observes it; ``None``: none. Returns
        outcome of each micro-batch, on ranks of the last stage."""
        micro_batches, batch = self.micro_batches(share), share.batch
        fields = LossFields(
            micro_batches,
            self.platform.torch_device,
            {
                "old_log_probs": batch.old_log_probs,
                "engine_log_probs": batch.engine_log_probs,
                "advantages": batch.advantages,
                "mask": batch.loss_mask,
                "weights": share.weights,
                "policy_factors": batch.policy_factors,
                "ref_log_probs": batch.ref_log_probs,
            },
        )
        objective = policy_loss(fields, plan.objective)
        if observer is not None:
            objective = observer.watching(objective, share)
        with contextlib.ExitStack() as stack:
            if self.routing is not None:
                stack.enter_context(self.routing.replaying(begin, share, micro_batches))
            return self.forward_backward(micro_batches, self._of_log_probs(objective))

    @torch.no_grad()
    def _freely_routed(self, share: Share) -> TokenValues | None:
        """On the rank that reports, the values of a minibatch whose tokens go where the present
        routers choose."""
        self.load_parameters()
        values = self.forward(self.micro_batches(share), self._of_log_probs(keep_values))
        return concatenate(values) if self.is_last_stage and self.reports else None

    def _of_log_probs(self, function: OnLogProbs[T]) -> OnOutput[T]:
        return of_log_probs(
            function,
            temperature=self.settings.temperature,
            vocab_size=self.spec.vocab,
            batch_invariant=self.settings.model.precision.batch_invariant,
            head=head_of(self.chunks[-1]),
        )

    def _totals(
        self, share: Share, outcomes: Outcomes, names: MetricNames
    ) -> tuple[dict[str, float], dict[str, float], Farthest]:
        """Sums, maxima and the farthest token of the minibatch, over micro-batches and ranks, from
        one all-gather."""
        sums = torch.zeros(len(names.sums), dtype=torch.float64)
        maxima = torch.full((len(names.maxima),), -torch.inf, dtype=torch.float64)
        farthest = Farthest()
        outputs = [output for output, _ in outcomes]
        if self.reports and outputs:
            for output, values in outcomes:
                own = Farthest.of(output, values.response_rows, share)
                farthest = max(farthest, own, key=abs)
            for row in stack_values([output.metric_sums for output in outputs], names.sums):
                sums += row
            for row in stack_values([output.metric_maxima for output in outputs], names.maxima):
                # torch.maximum keeps NaN, which has to be seen.
                maxima = torch.maximum(maxima, row)
        own_farthest = torch.tensor(dataclasses.astuple(farthest), dtype=torch.float64)
        gathered = self.all_gather(torch.cat([sums, maxima, own_farthest]))
        widths = [len(names.sums), len(names.maxima), own_farthest.numel()]
        total, top, far = gathered.split(widths, dim=1)
        return (
            dict(zip(names.sums, total.sum(0).tolist(), strict=True)),
            dict(zip(names.maxima, top.amax(0).tolist(), strict=True)),
            max((Farthest(*row) for row in far.tolist()), key=abs),
        )


def _is_narrow(objective: ObjectiveSettings) -> bool:
    """Whether rounding alone may exclude a sequence from the loss."""
    options = objective.loss_options
    ends = [getattr(options, name, None) for name in ("clip_low", "clip_high")]
    narrow = any(isinstance(one, float) and one < LEAST_CLIP for one in ends)
    return narrow or objective.off_policy_mask_kl is not None


def _signal(values: TokenValues) -> Tensor:
    """The size of a micro-batch's gradient by its log-probs."""
    assert values.sequence_sums is not None
    return values.sequence_sums[:, GRADIENT].nan_to_num(0.0).abs().sum()
