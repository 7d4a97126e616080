"""Settings that the driver sends to the Megatron ranks, and their results. Imports no Megatron,
which takes seconds and is of no use to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from rlmath.actor.communicators import Communicators
from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import PLAIN, StepPlan
from rlmath.actor.sequence_report import SequenceReport
from rlmath.actor.step_probe import StepFindings
from rlmath.actor.token_traces import TokenTrace
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.off_policy import OffPolicyTotals
from rlmath.algorithms.totals import add
from rlmath.batching.shards import ShardSettings
from rlmath.config.actor import ActorConfig
from rlmath.config.optimizer import OptimizerConfig
from rlmath.model.fp8 import NOTHING, InFp8
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from rlmath.weights.sequence_fingerprints import SequenceFingerprints

RENEWED = ("averaged", "reset")  # References that MegatronActor.renew_reference changes.


@dataclass(frozen=True)
class ActorSettings:
    """All settings of a rank except its place."""

    model_path: str  # Hugging Face folder of the initial weights.
    model: ModelSettings  # Settings of the model.
    # With decay_steps set, unless the schedule is constant; None for a model that is not trained
    # (the reference).
    optimizer: OptimizerConfig | None
    temperature: float  # Sampling temperature, at which log-probs are taken.
    max_tokens_per_microbatch: int  # Token budget of a micro-batch.
    max_sequence_length: int  # Longest prompt and response together, in tokens.
    # Token budget of a micro-batch of a forward-only pass; None: it takes the update's
    # micro-batches.
    max_tokens_per_forward: int | None = None
    # The reference model of a KL term, in host memory: none; frozen: the initial weights; or one of
    # RENEWED.
    reference: str = "none"
    # Share the optimizer's state between data-parallel ranks.
    distributed_optimizer: bool = ActorConfig.distributed_optimizer
    # Sum gradients over ranks while the last micro-batch is computed.
    overlap_gradients: bool = ActorConfig.overlap_gradients
    # Gather updated parameters during the next forward pass.
    overlap_param_gather: bool = ActorConfig.overlap_param_gather
    # Memory moved to the host while engines sample: none, optimizer or all.
    offload: str = ActorConfig.offload.value
    # Keep the optimizer's state on the device only for its steps.
    offload_in_backward: bool = ActorConfig.offload_in_backward
    # none; old_log_probs: an update of a MoE takes the routes of the old-log-prob pass; engine:
    # both take those that the engine sampled with.
    routing_replay: str = ActorConfig.routing_replay.value
    # Sequences with one prompt share its rows; see pack. Only where sharing_problem finds nothing.
    share_prompts: bool = False
    # Low-rank adapters, the only trained weights; None: all weights are trained.
    lora: Lora | None = None
    # The engines' FP8 computations, for which the gate's noise must account.
    engines_in_fp8: InFp8 = NOTHING
    value: ActorSettings | None = None  # Settings of the value model in the same processes, if any.


@dataclass(frozen=True)
class StartedRank:
    """A rank's report that it is ready."""

    data_parallel_rank: int  # Index of its share of a batch.
    weights_bytes: int  # Size of its part of the policy.
    read_s: float  # Seconds spent reading that from the model's folder.
    # Communicators that it has opened.
    communicators: Communicators = field(default_factory=Communicators)


def shard_settings(actor: ActorSettings, layout: Layout, plan: StepPlan = PLAIN) -> ShardSettings:
    """Settings for sharding a step's sequences over the ranks of a layout."""
    return ShardSettings(
        layout.data_parallel,
        actor.max_tokens_per_microbatch,
        max_tokens_per_forward=actor.max_tokens_per_forward,
        minibatches=plan.minibatches,
        seed=plan.seed,
        # Megatron's interleaved schedule needs whole rounds of the stages.
        multiple_of=layout.pipeline_parallel if layout.virtual_stages > 1 else 1,
        aggregation=plan.aggregation,
        constant_length=plan.constant_length,
        aggregation_options=plan.aggregation_options,
        share_prompts=actor.share_prompts,
    )


@dataclass(frozen=True)
class UpdateResult:
    minibatches: list[dict[str, float]]  # Metrics of each computed minibatch, equal on all ranks.
    # Reason of each minibatch that was stopped early, by its index. (One whose gradient is exactly
    # 0 is also discarded, without a reason: nothing is wrong with it.)
    early_stopped: dict[int, str]
    # On ranks of the last stage: the policy's values for the rank's sequences of the first
    # minibatch, before any update, in the shard's order.
    first: TokenValues | None
    # Message for each minibatch with tokens whose log-ratio was clamped, by its index.
    clamped: dict[int, str] = field(default_factory=dict)
    # Agreement of these log-probs with the rollout log-probs, unless a pass came before.
    alignment: Alignment | None = None
    fingerprints: SequenceFingerprints | None = None  # Fingerprints of these log-probs, likewise.
    # Metrics of routing replay, routing/...; empty without it.
    routing: dict[str, float] = field(default_factory=dict)
    # Traces of the rank's sequences that were selected for them.
    traces: tuple[TokenTrace, ...] = ()
    # Fingerprints of the minibatches' gradients by tensor, equal on all ranks.
    gradients: dict[str, int] = field(default_factory=dict)
    # On ranks that report: tokens of their sequences left out by off_policy_mask_kl, by the version
    # of the sampling weights; empty without it.
    off_policy: Mapping[int, OffPolicyTotals] = field(default_factory=dict)
    # On ranks that report: their sequences' contributions to the loss.
    sequences: SequenceReport | None = None
    schedule_steps: int = 0  # Steps of the learning-rate schedule before the update.
    # First rank with a finding of its probe, and the finding, per minibatch.
    step_findings: StepFindings = ()

    @classmethod
    def join(cls, parts: Sequence[UpdateResult]) -> UpdateResult:
        sequences = [one.sequences for one in parts if one.sequences is not None]
        prints = [one.fingerprints for one in parts if one.fingerprints is not None]
        alignments = [one.alignment for one in parts if one.alignment is not None]
        return replace(
            parts[0],
            alignment=Alignment.join(alignments) if alignments else None,
            fingerprints=SequenceFingerprints.join(prints) if prints else None,
            traces=tuple(trace for one in parts for trace in one.traces),
            off_policy=reduce(add, (one.off_policy for one in parts)),
            sequences=SequenceReport.join(sequences) if sequences else None,
        )
