"""What the driver tells the Megatron ranks, and what they answer. Imports no Megatron: it takes
seconds, and the driver has no use for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlmath.actor.communicators import Communicators
from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import PLAIN, StepPlan
from rlmath.actor.sequence_report import SequenceReport
from rlmath.actor.step_probe import StepFinding
from rlmath.actor.token_traces import TokenTrace
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.off_policy import OffPolicyTotals, add_by_version
from rlmath.batching.shards import ShardSettings
from rlmath.config.actor import ActorConfig
from rlmath.config.optimizer import OptimizerConfig
from rlmath.model.fp8 import NOTHING, InFp8
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from rlmath.weights.sequence_fingerprints import SequenceFingerprints


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference model of a KL term.

    Attributes:
        kind: ``none``; ``frozen``: the weights to begin with; ``averaged`` and ``reset``: renewed
            by ``MegatronActor.renew_reference``.
    """

    kind: str = "none"

    @property
    def renewed(self) -> bool:
        """Whether it changes in the course of a run."""
        return self.kind in ("averaged", "reset")


@dataclass(frozen=True)
class ActorSettings:
    """Everything that a rank needs to know, besides its place.

    Attributes:
        model_path: Hugging Face folder of the weights to begin with.
        model: How to build the model.
        optimizer: With ``decay_steps`` set, unless the schedule is constant; ``None`` for a model
            that is not trained (the reference).
        temperature: Of sampling; log-probs are taken at it.
        max_tokens_per_microbatch: Token budget of a micro-batch.
        max_sequence_length: Longest prompt and response together, in tokens.
        reference: Whether to keep a reference model, in host memory.
        distributed_optimizer: Data-parallel ranks share the optimizer's state.
        overlap_gradients: They are summed over ranks while the last micro-batch is computed.
        overlap_param_gather: Updated parameters are gathered during the next forward pass.
        offload: ``none``, ``optimizer`` or ``all``: what goes to host memory while engines sample.
        offload_in_backward: The optimizer's state is on the device for its steps alone.
        routing_replay: ``none``; ``old_log_probs``: an update of a MoE takes the routes of the
            old-log-prob pass; ``engine``: both take those that the engine sampled with.
        share_prompts: Sequences with one prompt share its rows; see ``pack``. Only where
            ``sharing_problem`` finds nothing.
        lora: Low-rank adapters, which alone are trained; ``None``: all weights are.
        engines_in_fp8: What the engines compute in FP8, which the gate's noise has to show.
        value: The value model, in the same processes; ``None``: none.
    """

    model_path: str
    model: ModelSettings
    optimizer: OptimizerConfig | None
    temperature: float
    max_tokens_per_microbatch: int
    max_sequence_length: int
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    distributed_optimizer: bool = ActorConfig.distributed_optimizer
    overlap_gradients: bool = ActorConfig.overlap_gradients
    overlap_param_gather: bool = ActorConfig.overlap_param_gather
    offload: str = ActorConfig.offload.value
    offload_in_backward: bool = ActorConfig.offload_in_backward
    routing_replay: str = ActorConfig.routing_replay.value
    share_prompts: bool = False
    lora: Lora | None = None
    engines_in_fp8: InFp8 = NOTHING
    value: ActorSettings | None = None


@dataclass(frozen=True)
class StartedRank:
    """What a rank says when it is ready.

    Attributes:
        data_parallel_rank: Whose share of a batch it works on.
        weights_bytes: Of its part of the policy.
        read_s: Seconds in which that was read from the model's folder.
        communicators: That it opened before.
    """

    data_parallel_rank: int
    weights_bytes: int
    read_s: float
    communicators: Communicators = field(default_factory=Communicators)


def shard_settings(actor: ActorSettings, layout: Layout, plan: StepPlan = PLAIN) -> ShardSettings:
    """How a step's sequences are dealt to the ranks of a layout."""
    return ShardSettings(
        layout.data_parallel,
        actor.max_tokens_per_microbatch,
        minibatches=plan.minibatches,
        seed=plan.seed,
        # Megatron's interleaved schedule takes whole rounds of the stages.
        multiple_of=layout.pipeline_parallel if layout.virtual_stages > 1 else 1,
        aggregation=plan.aggregation,
        constant_length=plan.constant_length,
        share_prompts=actor.share_prompts,
    )


@dataclass(frozen=True)
class UpdateResult:
    """What an update leaves to report.

    Attributes:
        minibatches: Metrics of each minibatch that was looked at, equal on all ranks.
        early_stopped: Why each minibatch that was stopped early was, by its index. (One whose
            gradient is exactly 0 is discarded as well, without a word: nothing is wrong with it.)
        clamped: What was said of each minibatch with tokens whose log-ratio was clamped, by its
            index.
        first: On ranks of the last stage: what the policy gave for the rank's sequences of the
            first minibatch, before any update, in the shard's order.
        alignment: Of these log-probs and the rollout log-probs, unless there was a pass before.
        fingerprints: Of these log-probs, likewise.
        routing: Metrics of routing replay, ``routing/...``; empty without it.
        traces: Of sequences that were to be traced and are among the rank's.
        gradients: Fingerprints of the minibatches' gradients by tensor, equal on all ranks.
        off_policy: On ranks that report: what ``off_policy_mask_kl`` left out of their sequences,
            by the version of the weights that sampled; empty without it.
        sequences: On ranks that report: what their sequences brought into the loss.
        schedule_steps: Steps of the learning-rate schedule before it.
        step_findings: Of each minibatch, the first rank whose probe found something, and that.
    """

    minibatches: list[dict[str, float]]
    early_stopped: dict[int, str]
    first: TokenValues | None
    clamped: dict[int, str] = field(default_factory=dict)
    alignment: Alignment | None = None
    fingerprints: SequenceFingerprints | None = None
    routing: dict[str, float] = field(default_factory=dict)
    traces: tuple[TokenTrace, ...] = ()
    gradients: dict[str, int] = field(default_factory=dict)
    off_policy: Mapping[int, OffPolicyTotals] = field(default_factory=dict)
    sequences: SequenceReport | None = None
    schedule_steps: int = 0
    step_findings: tuple[tuple[int, StepFinding], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[UpdateResult]) -> UpdateResult:
        """Those of all ranks that report together."""
        sequences = [one.sequences for one in parts if one.sequences is not None]
        prints = [one.fingerprints for one in parts if one.fingerprints is not None]
        alignments = [one.alignment for one in parts if one.alignment is not None]
        return replace(
            parts[0],
            alignment=Alignment.joined(alignments) if alignments else None,
            fingerprints=SequenceFingerprints.joined(prints) if prints else None,
            traces=tuple(trace for one in parts for trace in one.traces),
            off_policy=add_by_version(one.off_policy for one in parts),
            sequences=SequenceReport.joined(sequences) if sequences else None,
        )
