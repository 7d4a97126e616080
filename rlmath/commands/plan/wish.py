"""What a plan is asked for: a model, GPUs, the work of a step, and the settings that are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.time import Work
from rlmath.config.actor import RoutingReplay
from rlmath.config.weights import bucket_mib
from rlmath.model.fp8_training import Fp8Training
from rlmath.model.lora import Lora
from rlmath.model.spec import ModelSpec


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        path: Of the model, for the overrides.
        spec: Of the model.
        gpu: The card; its memory is ``gpu.memory_gib``.
        gpus: How many.
        gpus_per_node: Of one node.
        work: A step.
        max_tokens: Token budget of a micro-batch; ``None``: the longest sequence, or as many of
            them as fit beside each other and are faster.
        max_running: Sequences that an engine runs at once; ``None``: as many as make it faster.
        bucket_mib: ``weights.bucket_size_mib``.
        efficiency: Assumptions about time.
        tp: Tensor-parallel ranks of the actor; ``None``: any. So for the next ones.
        pp: Pipeline stages.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks.
        engine_tp: Tensor-parallel ranks of an engine.
        recompute_layers: Recomputed layers of a stage; ``None``: as few as fit.
        layers: ``transformer_engine`` or ``local``: ``actor.layers``.
        reference: A KL term, which has a reference model.
        value_model: GAE, which has a value model.
        whole_logits: ``actor.logits=whole``.
        triton_logits: ``actor.logits=triton``.
        lora: ``actor.lora``.
        unmerged: ``actor.lora.rollout``: engines get the adapters alone.
        fp8: ``actor.fp8``, ``actor.fp8_recipe``.
        quantized: ``rollout.quantization``: engines have the matrices of layers in FP8.
        kv_cache_in_fp8: ``rollout.kv_cache_dtype``.
        routing_replay: ``actor.routing_replay``.
        virtual_stages: ``actor.virtual_stages``; above 1 the actor has pipeline stages.
        recompute_modules: Of every layer; with some no layers are.
        overlap_gradients: ``actor.overlap_gradients``; layouts of one copy have none to add up.
        overlap_param_gather: ``actor.overlap_param_gather``, likewise; nor has a step of one
            minibatch a pass to gather in.
        offload: ``actor.offload``; ``None``: nothing is, unless :func:`with_least_offload`
            chooses.
        offload_in_backward: ``actor.offload_in_backward``, with an ``offload``; ``None`` as of
            ``offload``.
    """

    path: str
    spec: ModelSpec
    gpu: Gpu
    gpus: int
    gpus_per_node: int
    work: Work
    max_tokens: int | None
    max_running: int | None
    bucket_mib: int | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    engine_tp: int | None = None
    recompute_layers: int | None = None
    layers: str = "transformer_engine"
    reference: bool = False
    value_model: bool = False
    whole_logits: bool = False
    triton_logits: bool = False
    lora: Lora | None = None
    unmerged: bool = False
    fp8: Fp8Training | None = None
    quantized: bool = False
    kv_cache_in_fp8: bool = False
    routing_replay: RoutingReplay = RoutingReplay.none
    virtual_stages: int = 1
    recompute_modules: tuple[str, ...] = ()
    overlap_gradients: bool = False
    overlap_param_gather: bool = False
    offload: str | None = None
    offload_in_backward: bool | None = None

    @property
    def bucket_size_mib(self) -> int:
        """Of the weight sync."""
        return bucket_mib(self.bucket_mib, 2 * self.spec.num_parameters)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def longest_microbatch(self) -> int:
        """The budget, or one sequence that is longer than it."""
        return max(self.max_tokens or 0, self.work.longest_tokens)

    @property
    def replays(self) -> bool:
        """Whether an update replays routes."""
        return self.routing_replay is not RoutingReplay.none
