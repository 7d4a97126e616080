"""Counts one rank: builds it as a run does and takes it through every phase of a step.

For its own process; see :func:`prepare_process`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dry_run import groups, meta_gpu
from benchmarks.dry_run.jobs import Job, PhaseCount, RankCount
from benchmarks.dry_run.meter import META, Meter, Peak, Pool
from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import ActorSettings
from rlmath.algorithms.early_stop import Decision
from rlmath.batching.shards import Shard
from rlmath.config.optimizer import OptimizerConfig
from rlmath.device import Platform
from rlmath.model.precision import Precision
from rlmath.model.spec import model_spec
from rlmath.types import TrainingBatch

# A GPU rank with Megatron's own layers; "fake" is the backend of groups.install.
PLATFORM = Platform("cuda", "fake", "local")  # type: ignore[arg-type]
# Lines of a peak's contents that are kept.
_MOST_LINES = 25
MIB = 2**20


def prepare_process() -> None:
    """Replace what a GPU and other ranks would do; irreversible. Call once, before the rest."""
    meta_gpu.install()
    groups.install()
    _remember_in_flight()
    _route_evenly()
    # Imported modules stay: no collection of garbage, of which each count needs several, looks at
    # it.
    gc.collect()
    gc.freeze()


def count(job: Job) -> RankCount:
    """Build the rank and run its phases, all on meta tensors.

    Of the copies of the rank, the one with the largest piece of a parameter is counted; see
    :func:`rank_of_largest_piece`.
    """
    from rlmath.actor.parallel import destroy, initialize

    began = time.monotonic()
    groups.answer_with(groups.Peers(model_spec(job.config), job.layout, torch.bfloat16))

    @contextlib.contextmanager
    def build(rank: int) -> Iterator[_Rank]:
        meter = Meter()
        resize = mock.patch("rlmath.actor.offload.resize", meter.resize)
        with resize, meta_gpu.CudaIsMeta(meter), meter:
            initialize(job.layout, PLATFORM, rank, "127.0.0.1", 0, seed=1)
            try:
                yield _Rank(job, meter)
            finally:
                destroy()

    with build(job.rank) as first:
        buffers = [buffer for one in first.actor.models for buffer in one.buffers]
        rank = rank_of_largest_piece(buffers, job.rank)
        if rank == job.rank:
            return first.count(began)
    with build(rank) as copy:
        return copy.count(began)


def rank_of_largest_piece(buffers: Sequence[Any], rank: int) -> int:
    """The copy of a rank whose share of the optimizer has the largest piece of one parameter.

    The distributed optimizer splits each bucket of Megatron's gradient buffers evenly among the
    copies, without regard to where a parameter ends. Torch's Adam allocates temporaries of the
    size of a piece, so that copies differ in the peak of the optimizer step.

    Args:
        buffers: Buffers of the rank's ``DistributedDataParallel``.
        rank: Global rank, returned if no copy has a larger piece than it.
    """
    largest: dict[int, int] = {}
    for buffer in buffers:
        copies = dist.get_process_group_ranks(buffer.data_parallel_group)
        for start, end, number in buffer.param_index_map.values():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // len(copies)
            start, end = start - bucket.offset, end - bucket.offset
            for n in range(start // share, -(-end // share)):
                piece = min(end, (n + 1) * share) - max(start, n * share)
                largest[copies[n]] = max(largest.get(copies[n], 0), piece)
    return max(largest, key=lambda one: (largest[one], one == rank), default=rank)


class _Rank:
    def __init__(self, job: Job, meter: Meter) -> None:
        self.job, self.layout, self.meter = job, job.layout, meter
        self.phases: dict[str, PhaseCount] = {}
        spec = model_spec(job.config)
        if spec.experts:
            meter.routed = lambda mask: (
                mask.size(1) * spec.experts_per_token
                if mask.dim() == 2 and mask.size(0) == spec.experts
                else None
            )
        self.actor, self.value_model = self._build()

    def count(self, began: float) -> RankCount:
        from rlmath.checkpoint.optimizer_state import initialize_states

        job, actor = self.job, self.actor
        # Allocations of Adam's first step.
        for model in filter(None, (actor, self.value_model)):
            if job.offload == "none":  # Else it was made at once.
                initialize_states(model.optimizer)
        _in_flight.clear()
        # The update first: what it leaves behind is there in every later phase of a run.
        if "update" in job.phases:
            self._update()
            actor.release_optimizer()
        in_flight = _in_flight.most
        if self.value_model is not None:
            with self._phase("value update"):
                self.value_model.update(self._batch(), StepPlan(), seed=1)
            self.value_model.release()
        actor.release()
        with self._phase("state"):
            pass
        if "log-probs" in job.phases:
            with self._phase("log-probs"):
                actor.log_probs(self._batch())
        if job.reference:
            with self._phase("reference"):
                actor.log_probs(self._batch(), "reference")
        if "weight sync" in job.phases:
            actor.load_parameters()
            with self._phase("weight sync"):
                self._weight_sync()
        if "checkpoint" in job.phases:
            with self._phase("checkpoint"):
                self._checkpoint()
        parameters = sum(p.numel() for p in actor.module.parameters())
        return RankCount(job, self.phases, in_flight, parameters, time.monotonic() - began)

    def _update(self) -> None:
        actor = self.actor
        step: Callable[[], Any] = actor.optimizer.step

        def counted_step() -> Any:
            with self._phase("optimizer step"):
                return step()

        # Gradients that are compared with others need values.
        actor.updates = 1
        shard = actor.shard_of(self._batch())
        if actor.routing is not None:
            actor.shard_log_probs(shard, "old")
        # The sums that it decides by have no values here.
        keep = mock.Mock(return_value=Decision("keep"))
        with (
            mock.patch("rlmath.actor.policy.decide", keep),
            mock.patch.object(actor.optimizer, "step", counted_step),
            # Without values there are no fingerprints; they take no more than a chunk.
            mock.patch.object(actor, "tensor_prints"),
            self._phase("update"),
        ):
            result = actor.update_shard(shard, StepPlan())
        assert result.minibatches[0]["discarded"] == 0.0, "the optimizer has to step"
        assert "optimizer step" in self.phases

    def _weight_sync(self) -> None:
        """As the transport ``ipc`` does: vLLM's buffer, and tensors gathered bucket by bucket."""
        from rlmath.weights.gather import BucketGatherer

        actor = self.actor
        gatherer = BucketGatherer(
            actor.chunks,
            actor.spec,
            actor.parallel,
            self.job.bucket_mib,
            merge=actor.merger(),
        )
        largest = max(meta.num_bytes for meta in gatherer.tensors)
        size = max(self.job.bucket_mib * MIB, largest)
        buffer = torch.empty(size, dtype=torch.uint8, device=META)
        buckets = gatherer.gather(destination=None)
        while bucket := next(buckets, None):
            bucket.reverse()
            while bucket:  # What was read is let go, as GatheredSource does.
                flat = bucket.pop()[1].contiguous().view(-1).view(torch.uint8)
                buffer[: flat.numel()].copy_(flat)

    def _checkpoint(self) -> None:
        from rlmath.checkpoint import state

        nothing = mock.Mock(return_value=None)
        # The others' shards are not known, so nobody can check that all of them cover the whole.
        unchecked = "megatron.core.dist_checkpointing.state_dict_utils.validate_sharding_integrity"
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch(unchecked, nothing))
            for name in ("write_tensors", "write_common", "save_streams"):
                stack.enter_context(mock.patch.object(state, name, nothing))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            (Path(folder) / "actor").mkdir()  # Rank 0 would.
            with mock.patch.object(state, "background_group", lambda: None):
                for model in filter(None, (self.actor, self.value_model)):
                    model.load_parameters()
                with self.actor.device_state.optimizer_readable():
                    state.begin_saves({"actor": self.actor}, folder).result()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.meter.phase() as peaks:
            yield
        self.phases[name] = _phase_count(peaks)

    def _build(self) -> tuple[Any, Any]:
        """The rank's actor, and its value model if there is one, with weights that nobody reads."""
        from rlmath.actor import policy, value

        job = self.job
        spec = model_spec(job.config)
        nothing = mock.Mock(return_value=None)
        with contextlib.ExitStack() as stack:
            for target, name, replacement in (
                (_module("rlmath.weights.megatron"), "load_from_hf", nothing),
                (_module("rlmath.model.spec"), "read_model_spec", lambda folder: spec),
            ):
                stack.enter_context(mock.patch.object(target, name, replacement))
            actor = _with_own_share(policy.MegatronActor, job)(
                self._settings(), self.layout, PLATFORM
            )
            actor.release()
            value_model = None
            if job.value_model:
                settings = dataclasses.replace(self._settings(), lora=None)
                value_model = _with_own_share(value.ValueModel, job)(
                    settings, self.layout, PLATFORM
                )
                value_model.release()
        return actor, value_model

    def _settings(self) -> ActorSettings:
        job = self.job
        lm_head = "float32" if job.lm_head_float32 else "model"
        return ActorSettings(
            model_path="",
            model=ModelSettings(
                torch.bfloat16,
                sequence_parallel=job.layout.tensor_parallel > 1,
                recompute=job.recompute,
                recompute_num_layers=job.recompute_layers or None,
                recompute_modules=job.recompute_modules,
                precision=Precision(lm_head_dtype=lm_head),
                logits="whole" if job.whole_logits else "auto",
            ),
            optimizer=OptimizerConfig(lr=1e-5),
            temperature=1.0,
            max_tokens_per_microbatch=job.max_tokens,
            max_sequence_length=job.max_sequence_tokens,
            reference="frozen" if job.reference else "none",
            overlap_gradients=job.overlap_gradients,
            overlap_param_gather=job.overlap_param_gather,
            offload=job.offload,
            offload_in_backward=job.offload_in_backward,
            lora=job.lora,
            routing_replay=job.routing_replay,
        )

    def _batch(self) -> TrainingBatch:
        """This data-parallel rank's share alone."""
        lengths = torch.tensor(list(self.job.lengths) * self.job.microbatches)
        prompts, responses = lengths[:, 0].clone(), lengths[:, 1].clone()
        sequences, tokens = len(lengths), int(lengths.sum())
        per_token = torch.zeros(int(responses.sum()))
        return TrainingBatch(
            tokens=torch.zeros(tokens, dtype=torch.int64),
            prompt_lengths=prompts,
            response_lengths=responses,
            group_ids=torch.arange(sequences),
            weights_versions=torch.zeros(sequences, dtype=torch.int64),
            rewards=torch.zeros(sequences),
            engine_log_probs=per_token,
            advantages=per_token,
            loss_mask=torch.ones(per_token.shape, dtype=torch.bool),
            old_log_probs=per_token,
            ref_log_probs=per_token if self.job.reference else None,
            values=per_token if self.job.value_model else None,
            returns=per_token if self.job.value_model else None,
        )


def _with_own_share(cls: type, job: Job) -> type:
    """The class, taking a batch as this rank's share, already in micro-batches."""

    class OwnShare(cls):  # type: ignore[misc]
        def shard_of(self, batch: TrainingBatch, *_: Any) -> Shard:
            counts = (len(job.lengths),) * job.microbatches
            places, weights = torch.arange(len(batch)), torch.ones(len(batch))
            return Shard(batch, places, weights, (counts,))

    return OwnShare


def _phase_count(peaks: dict[Pool, Peak]) -> PhaseCount:
    contents = sorted(peaks["gpu"].contents.items(), key=lambda item: -item[1])[:_MOST_LINES]
    return PhaseCount(peaks["gpu"].num_bytes, peaks["host"].num_bytes, dict(contents))


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


# -- what only other ranks or values would know ----------------------------------------------------


class _InFlight:
    """Micro-batches that went forward and not yet backward."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.now = self.most = 0

    def forward(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def backward(self) -> None:
        self.now -= 1


_in_flight = _InFlight()


def _remember_in_flight() -> None:
    from megatron.core.pipeline_parallel import schedules

    for name, note in (
        ("forward_step", _in_flight.forward),
        ("backward_step", _in_flight.backward),
    ):
        original = getattr(schedules, name)

        def note(
            *args: Any, original: Any = original, note: Callable[[], None] = note, **kwargs: Any
        ) -> Any:
            note()
            return original(*args, **kwargs)

        setattr(schedules, name, note)


def _route_evenly() -> None:
    """Let an MoE's tokens go to all experts evenly: meta tensors do not say where they go."""
    from megatron.core.transformer.moe import token_dispatcher

    gather: Any = token_dispatcher.gather_from_sequence_parallel_region

    def gather_counts(counts: Tensor, *args: Any, group: Any, **kwargs: Any) -> Tensor:
        if counts.device == META:
            return gather(counts, *args, group=group, **kwargs)  # type: ignore[no-any-return]
        return counts.repeat(group.size())

    replaced: Any = token_dispatcher
    replaced.gather_from_sequence_parallel_region = gather_counts
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess = dispatcher.preprocess

    def evenly(self: Any, routing_map: Tensor) -> Any:
        tokens, experts = routing_map.shape
        places = torch.arange(tokens * self.config.moe_router_topk)
        even = torch.zeros(tokens, experts, dtype=torch.bool)
        even[places // self.config.moe_router_topk, places % experts] = True
        result = preprocess(self, even)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            setattr(self, name, splits.tolist() if isinstance(splits, Tensor) else splits)
        return result

    dispatcher.preprocess = evenly
