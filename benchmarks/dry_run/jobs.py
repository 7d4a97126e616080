"""Jobs of a count: one rank of a layout, in a form that can be sent to another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.lora import adapters_of
from rlmath.config.recompute import modules_of
from rlmath.config.schema import Device
from rlmath.config.weights import BUCKET_MIB, bucket_mib
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

# Phases in the order in which they are counted.
PHASES = ("state", "log-probs", "update", "optimizer step", "weight sync", "checkpoint")


@dataclass(frozen=True)
class Job:
    """One rank to count.

    Attributes:
        name: For messages.
        config: Contents of the model's config.json.
        layout: Layout of the ranks.
        rank: Global rank, for itself and its copies.
        recompute_layers: Recomputed layers of each stage.
        lengths: (prompt, response) tokens of the sequences of a micro-batch; all are alike.
        microbatches: Micro-batches of the optimizer step.
        max_tokens: Budget of a micro-batch.
        max_sequence_tokens: Longest sequence.
        bucket_mib: Bucket size of a weight sync.
        reference: A reference model is kept, as for a KL term.
        value_model: A value model is trained too, as for GAE.
        lm_head_float32: The output layer multiplies in float32.
        whole_logits: All logits of a micro-batch are in memory at once.
        offload: ``actor.offload``.
        offload_in_backward: ``actor.offload_in_backward``.
        lora: The policy's adapters.
        routing_replay: ``actor.routing_replay``.
        recompute_modules: Recomputed modules of every layer.
        overlap_gradients: ``actor.overlap_gradients``.
        overlap_param_gather: ``actor.overlap_param_gather``.
        phases: Phases to count; the state always is.
    """

    name: str
    config: dict[str, Any]
    layout: Layout
    rank: int
    recompute_layers: int
    lengths: tuple[tuple[int, int], ...]
    microbatches: int
    max_tokens: int
    max_sequence_tokens: int
    bucket_mib: int = BUCKET_MIB
    reference: bool = False
    value_model: bool = False
    lm_head_float32: bool = False
    whole_logits: bool = False
    offload: str = "none"
    offload_in_backward: bool = False
    lora: Lora | None = None
    routing_replay: str = "none"
    recompute_modules: tuple[str, ...] = ()
    overlap_gradients: bool = False
    overlap_param_gather: bool = False
    phases: tuple[str, ...] = PHASES

    @property
    def stage(self) -> int:
        return self.rank // (self.layout.world_size // self.layout.pipeline_parallel)

    @property
    def recompute(self) -> str:
        """``actor.recompute``."""
        if self.recompute_modules:
            return "selective"
        return "full" if self.recompute_layers else "none"

    @property
    def microbatch_tokens(self) -> int:
        """Before any padding."""
        return sum(prompt + response for prompt, response in self.lengths)


@dataclass(frozen=True)
class PhaseCount:
    """Peaks of one phase.

    Attributes:
        gpu_bytes: On the GPU.
        host_bytes: Tensors in this rank's host memory, without small ones.
        contents: Bytes on the GPU at its peak by type and shape, the largest first.
    """

    gpu_bytes: int
    host_bytes: int
    contents: dict[str, int]


@dataclass(frozen=True)
class RankCount:
    """Count of one rank's memory.

    Attributes:
        job: The counted rank.
        phases: By name.
        in_flight: Most micro-batches whose activations the stage kept at once.
        parameters: Elements of the rank's parameters.
        seconds: How long it took.
    """

    job: Job
    phases: dict[str, PhaseCount]
    in_flight: int
    parameters: int
    seconds: float


def microbatch(max_tokens: int, prompt: int, longest_response: int) -> tuple[tuple[int, int], ...]:
    """Sequences that fill the budget: the longest ones, then what is left; at least one.

    A sequence that is longer than the budget is its own micro-batch.
    """
    left = max_tokens
    found: list[tuple[int, int]] = []
    while left > 2 * prompt or not found:
        response = longest_response if not found else min(longest_response, left - prompt)
        if found and prompt + response > left:
            break
        found.append((prompt, response))
        left -= prompt + response
    if 2 <= left <= 2 * prompt:
        found.append((left // 2, left - left // 2))
    return tuple(found)


def _microbatches(layout: Layout) -> int:
    """As many as are in flight at most, and one more; interleaved, whole rounds of the stages."""
    stages = layout.pipeline_parallel
    if layout.virtual_stages > 1:
        return 3 * stages
    return stages + 1 if stages > 1 else 1


def stage_ranks(layout: Layout) -> list[int]:
    """A rank of each stage that differs from the others: the first, one in between, the last."""
    stages = layout.pipeline_parallel
    per_stage = layout.world_size // stages
    return [stage * per_stage for stage in sorted({0, min(1, stages - 1), stages - 1})]


def jobs_of(
    name: str, overrides: Sequence[str], layers: int | None = None, **changes: Any
) -> list[Job]:
    """The ranks to count of a run's settings, each stage once; all other ranks are like these.

    Args:
        name: For messages.
        overrides: As for ``rlmath train``; ``model.path`` ends in a name that the planner knows.
        layers: Layers of the model, the same share of them recomputed; ``None``: all.
        changes: Changed fields of the jobs.
    """
    config = load([*overrides, "runner.run_dir=runs/plan", "data.train_paths=[x]"])
    layout = resolve_layout(config, Device.cuda)
    known = dict(KNOWN[config.model.path.rsplit("/", 1)[-1]])
    actor = config.actor
    stage_layers = max(layout.actor.stage_sizes(known["num_hidden_layers"]))
    recomputed = 0
    if actor.recompute.value == "full":
        recomputed = min(actor.recompute_num_layers or stage_layers, stage_layers)
    if layers is not None:
        recomputed = round(recomputed * layers / known["num_hidden_layers"])
        known["num_hidden_layers"] = layers
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    job = Job(
        name=name,
        config=known,
        layout=layout.actor,
        rank=0,
        recompute_layers=recomputed,
        lengths=microbatch(actor.max_tokens_per_microbatch, prompt, response),
        microbatches=_microbatches(layout.actor),
        max_tokens=max(actor.max_tokens_per_microbatch, prompt + response),
        max_sequence_tokens=prompt + response,
        bucket_mib=bucket_mib(config.weights.bucket_size_mib, 2 * model_spec(known).num_parameters),
        reference=config.algorithm.kl_coef > 0,
        value_model=config.algorithm.advantage == "gae",
        lm_head_float32=config.precision.lm_head_dtype.value == "float32",
        whole_logits=actor.logits.value == "whole",
        offload=actor.offload.value,
        offload_in_backward=actor.offload_in_backward,
        lora=adapters_of(actor.lora, model_spec(known), seed=0),
        routing_replay=actor.routing_replay.value,
        recompute_modules=modules_of(actor, model_spec(known)),
        overlap_gradients=actor.overlap_gradients,
        overlap_param_gather=actor.overlap_param_gather,
    )
    job = dataclasses.replace(job, **changes)
    return [dataclasses.replace(job, rank=rank) for rank in stage_ranks(job.layout)]
