"""Base of the models that a rank trains: the policy and the value model.

A rank's work follows from its place in the layout and from its shard of the step
(``rlmath.batching.shards``), which is assigned before: the ranks need not agree on anything.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import ModuleList

from rlmath.actor.fp8 import prepare_for_fp8
from rlmath.actor.gradient_shares import GradientShares, Groups
from rlmath.actor.lora import Adapter, Merger, attach_adapters
from rlmath.actor.model import build_chunks
from rlmath.actor.offload import PARTS, DeviceState
from rlmath.actor.optimizer import build_optimizer, build_scheduler, wrap_chunks
from rlmath.actor.packing import PackedMicroBatch, pack
from rlmath.actor.parameter_gather import ParameterGather
from rlmath.actor.plan import PLAIN, StepPlan
from rlmath.actor.schedule import OnOutput, run_schedule
from rlmath.actor.settings import ActorSettings, shard_settings
from rlmath.actor.step_probe import OTHER_SLOPE, StepFinding, StepFindings, StepProbe
from rlmath.actor.stops import stops
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.batching.shards import Shard, Share, shards
from rlmath.checkpoint.optimizer_state import initialize_states
from rlmath.checkpoint.state import AdapterState, ModelState, free_group
from rlmath.config.optimizer import OptimizerConfig
from rlmath.config.shared_prompts import sharing_problem
from rlmath.device import Platform
from rlmath.model.lora import adapts_experts, describe
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch, TrainingBatch
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.tensor_prints import TensorPrints

T = TypeVar("T")


class RankModel:
    """This process's part of a model. All ranks call the same methods with the same arguments.

    Attributes:
        chunks: This rank's stage of the model, one for each virtual stage.
        module: All of them in one module; the chunk itself if there is one.
        models: The chunks with Megatron's data-parallel wrapper, unless they are not trained.
        adapters: Under LoRA those of this rank's stage, which alone are trained.
        reports: One rank of each data-parallel share returns its values.
        read_s: Seconds in which its weights were read.
        device_state: Parts of the model on the device; see ``release_optimizer``. Whoever reads
            parameters outside a forward pass reads through it, or calls ``load_parameters`` first.
        parameter_gather: All-gather of updated parameters.
        step_probe: Looks at the optimizer's steps; ``None``: there is no optimizer.
        step_finding: Finding of the last step.
    """

    def __init__(self, settings: ActorSettings, layout: Layout, platform: Platform) -> None:
        from megatron.core import parallel_state

        from rlmath.model.rank_layout import ParallelRank
        from rlmath.model.spec import read_model_spec

        self.settings, self.layout, self.platform = settings, layout, platform
        self.spec = read_model_spec(settings.model_path)
        if settings.share_prompts:
            problem = sharing_problem(self.spec, platform.name, layout.context_parallel)
            if problem is not None:
                raise ValueError(f"share_prompts: {problem}")
        self.parallel = ParallelRank.from_megatron()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.cp_rank = parallel_state.get_context_parallel_rank()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.reports = self.is_last_stage and self.parallel.tp_rank == 0 and self.cp_rank == 0
        self.chunks: list[Any] = self.build_stage()
        self.module: Any = self.chunks[0] if len(self.chunks) == 1 else ModuleList(self.chunks)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.step_probe: StepProbe | None = None
        self.step_finding = StepFinding()
        self._norm = 0.0
        self.gradient_shares: GradientShares | None = None
        self._gradient_finding = StepFinding()
        self.parameter_gather = ParameterGather([])
        fp8 = settings.model.fp8
        self._rows_per_rank = 1 if fp8 is None else fp8.block
        if fp8 is not None:
            prepare_for_fp8(self.chunks)
        if settings.optimizer is None:
            self.module.eval().requires_grad_(False)
            self.models = self.chunks
            self.device_state = DeviceState(self.module, [], None, platform)
            return
        self._make_trainable(settings.optimizer)

    def _make_trainable(self, optimizer: OptimizerConfig) -> None:
        """Gradients, optimizer and schedule."""
        settings = self.settings
        # Nodes may read the weights at different speeds, and the optimizer's next collective would
        # end a rank that waits for minutes (``Platform.collective_timeout_s``); gloo waits.
        dist.barrier(group=free_group())
        self.models = wrap_chunks(
            self.chunks,
            settings.distributed_optimizer,
            settings.overlap_gradients,
            settings.overlap_param_gather,
        )
        self.gradient_shares = GradientShares(self.models, Groups.of_megatron())
        self.parameter_gather = ParameterGather(
            self.models if settings.overlap_param_gather else []
        )
        if settings.model.fp8 is not None:
            prepare_for_fp8(self.models)
        self.optimizer = build_optimizer(
            self.models, optimizer, settings.model.dtype, distributed=settings.distributed_optimizer
        )
        self.scheduler = build_scheduler(self.optimizer, optimizer)
        self.step_probe = StepProbe(self.optimizer, optimizer)
        self.device_state = DeviceState(
            self.module, self.models, self.optimizer, self.platform, self.parameter_gather
        )
        if settings.offload != "none":
            # Adam would make them at its first step, beside what fills the device by then.
            initialize_states(self.optimizer)

    def build_stage(self) -> list[Any]:
        """This rank's stage, with the weights of the model's folder."""
        from rlmath.weights.megatron import load_from_hf

        settings = self.settings
        chunks = build_chunks(
            self.spec,
            self.layout,
            self.platform,
            dataclasses.replace(
                settings.model,
                separate_norms=settings.lora is not None,
                # Grouped products have no place for an adapter.
                separate_experts=settings.lora is not None
                and adapts_experts(self.spec, settings.lora),
            ),
            settings.max_sequence_length,
        )
        began_s = time.perf_counter()
        load_from_hf(chunks, settings.model_path, self.spec, self.parallel)
        self.adapters: list[Adapter] = []
        if settings.lora is not None:
            for chunk in chunks:
                self.adapters += attach_adapters(chunk, self.spec, self.parallel, settings.lora)
        self.read_s = time.perf_counter() - began_s
        return chunks

    def checkpoint_state(self) -> ModelState:
        self.parameter_gather.finish()
        kind = None
        if self.settings.optimizer is not None:
            kind = "distributed" if self.settings.distributed_optimizer else "plain"
        adapters = None
        if self.settings.lora is not None:
            adapters = AdapterState(describe(self.settings.lora), self._base_fingerprint)
        return ModelState(
            chunks=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            spec=self.spec,
            layout=self.layout,
            dtype=str(self.settings.model.dtype).removeprefix("torch."),
            optimizer_kind=kind,
            adapters=adapters,
        )

    @functools.cached_property
    def _base_fingerprint(self) -> int:
        """Fingerprint of the frozen model, equal on any layout. Collective the first time."""
        from rlmath.weights.fingerprint import add

        return functools.reduce(add, self.gatherer().fingerprints().values())

    def gatherer(self, **parameters: Any) -> BucketGatherer:
        """Gathers the model's weights. ``parameters``: further parameters of the gatherer."""
        return BucketGatherer(self.chunks, self.spec, self.parallel, **parameters)

    def merger(self) -> Merger | None:
        """Merges adapters into their matrices for sync and files; ``None``: no adapters."""
        if not self.settings.lora:
            return None
        return Merger(self.module, self.device_state.read, self.platform.torch_device)

    def tensor_prints(self) -> TensorPrints:
        """Fingerprints of gradients, or of weights, by tensor. Collective."""
        return TensorPrints(
            self.chunks,
            self.spec,
            self.parallel,
            self.optimizer,
            adapters=self.settings.lora,
            head=self.own_head(),
        )

    def own_head(self) -> dict[str, Tensor]:
        """By name, parameters of this stage that the model's files lack."""
        return {}

    # -- what is on the device: each phase loads what it needs ----------------------------------

    def load_parameters(self) -> None:
        """Bring the weights to the device, unless they are there, and complete them."""
        self.device_state.load("parameters")

    def begin_release(self, empty_cache: Callable[[], object]) -> None:
        """Free the gradients, and begin to copy the tensors that :meth:`release` offloads.
        Nothing may change until then without loading it. ``empty_cache``: gives memory back that is
        not used. It comes before the copies, as to free a block waits for all that the GPU does."""
        offloads = self.settings.offload != "none"
        if offloads:
            self.device_state.release("gradients")
        empty_cache()
        if not offloads:
            return
        self.device_state.begin_copy("optimizer")
        if self.settings.offload == "all":
            self.device_state.begin_copy("parameters")

    def release_optimizer(self) -> None:
        """Take gradients, main parameters and Adam's moments off the device, if
        ``actor.offload`` says so. Not within an update: the gradients are taken to be zero."""
        if self.settings.offload != "none":
            self.device_state.release("gradients", "optimizer")

    def release(self) -> None:
        """Take all off the device that ``actor.offload`` says: nothing is needed for sampling."""
        self.release_optimizer()
        if self.settings.offload == "all":
            self.device_state.release("parameters")

    # -- what subclasses build an update from ---------------------------------------------------

    def shard_of(self, batch: TrainingBatch, plan: StepPlan = PLAIN, seed: int = 0) -> Shard:
        """This rank's shard of a batch that all ranks have."""
        plan = dataclasses.replace(plan, seed=seed)
        settings = shard_settings(self.settings, self.layout, plan)
        return next(shards(batch, settings, only=self.dp_rank))

    def micro_batches(self, share: Share) -> list[PackedMicroBatch]:
        return [self._pack(share.batch, one) for one in share.micro_batches]

    def _pack(self, batch: TrainingBatch, one: MicroBatch) -> PackedMicroBatch:
        return pack(
            batch,
            one,
            self.platform,
            self.layout,
            self.cp_rank,
            self._rows_per_rank,
            self.settings.share_prompts,
        )

    def forward(self, micro_batches: Sequence[PackedMicroBatch], on_output: OnOutput[T]) -> list[T]:
        """Run the model without gradients; see :func:`run_schedule`."""
        self.load_parameters()
        self.parameter_gather.before_pass()
        self.module.eval()
        return self._run(micro_batches, on_output, backward=False)

    def forward_backward(
        self, micro_batches: Sequence[PackedMicroBatch], on_output: OnOutput[T]
    ) -> list[T]:
        """Run the model and sum the gradients of a minibatch; see :func:`run_schedule`."""
        if self.settings.offload_in_backward:
            # Activations have its memory until the optimizer steps.
            self.device_state.release("optimizer")
            self.device_state.load("parameters", "gradients", complete=False)
        else:
            self.device_state.load(*PARTS, complete=False)
        self.parameter_gather.before_pass()
        self.module.train()
        self.clear_gradients()
        assert self.gradient_shares is not None
        self.gradient_shares.begin()
        found = self._run(micro_batches, on_output, backward=True)
        self._gradient_finding = self.gradient_shares.sums()
        return found

    def _run(
        self, micro_batches: Sequence[PackedMicroBatch], on_output: OnOutput[T], *, backward: bool
    ) -> list[T]:
        return run_schedule(
            self.models, micro_batches, on_output, backward=backward, shortest=self._shortest
        )

    @functools.cached_property
    def _shortest(self) -> PackedMicroBatch:
        """A micro-batch of one sequence of two tokens."""
        batch = batch_of_sequences([([0], [0])])
        return self._pack(batch, MicroBatch((0,), 2))

    def all_gather(self, mine: Tensor) -> Tensor:
        """``[ranks, n]`` on the CPU, from ``[n]`` of each rank."""
        mine = mine.to(self.platform.torch_device)
        flat = mine.new_empty(dist.get_world_size() * mine.numel())
        dist.all_gather_into_tensor(flat, mine)
        return flat.view(-1, mine.numel()).cpu()

    def gather(self, mine: Tensor) -> Tensor:
        """``[data-parallel ranks, n]`` on the CPU, from ``[n]`` of each; see ``Peers``."""
        from megatron.core import parallel_state

        mine = mine.to(self.platform.torch_device)
        ranks = self.layout.data_parallel
        flat = mine.new_empty(ranks * mine.numel())
        group = parallel_state.get_data_parallel_group()
        dist.all_gather_into_tensor(flat, mine, group=group)
        return flat.view(ranks, -1).cpu()

    def add(self, mine: Tensor) -> Tensor:
        """``[n]`` on the CPU, the sum of ``[n]`` of each data-parallel rank; see ``Peers``."""
        from megatron.core import parallel_state

        total = mine.to(self.platform.torch_device, copy=True)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def gradient_norm(self) -> float:
        """Norm of the minibatch's gradient, over all ranks. Call once, after the backward pass."""
        self.optimizer.prepare_grads()
        self._norm = float(self.optimizer.get_grad_norm())
        return self._norm

    def check_given(self, signals: Sequence[Tensor], count: int) -> None:
        """Note for the step's finding whether a micro-batch that has a gradient gave a matrix of
        this rank nothing. Collective.

        Args:
            signals: Size of the gradient that goes back, for each micro-batch of the last pass;
                only ranks of the last stage have it.
        """
        from megatron.core import parallel_state

        assert self.gradient_shares is not None
        given = self.gradient_shares.gradient_sizes(count)
        sizes = torch.zeros(count, dtype=torch.float64, device=given.device)
        for number, signal in enumerate(signals):
            sizes[number] = signal
        if self.layout.pipeline_parallel > 1:
            stages = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(sizes, group=stages)
        if self.layout.context_parallel > 1:
            # A rank may have nothing but padding.
            contexts = parallel_state.get_context_parallel_group()
            dist.all_reduce(given, op=dist.ReduceOp.MAX, group=contexts)
        if not self._gradient_finding.kind:
            self._gradient_finding = self.gradient_shares.nothing_given(given, sizes)

    def worst_findings(self, mine: Sequence[StepFinding]) -> StepFindings:
        """First rank with a finding, and the finding, for each minibatch; a slope, which all ranks
        find alike, if there is no other. Collective."""
        kinds = torch.tensor([one.kind for one in mine], dtype=torch.float64)
        of_ranks = self.all_gather(kinds)
        if not bool(of_ranks.any()):
            return tuple((0, one) for one in mine)
        everyone: list[Sequence[StepFinding]] = [()] * len(of_ranks)
        dist.all_gather_object(everyone, list(mine))
        found = of_ranks > 0
        first = (found.int() + (found & (of_ranks != OTHER_SLOPE))).argmax(0).tolist()
        return tuple((rank, everyone[rank][index]) for index, rank in enumerate(first))

    def forget_steps(self) -> None:
        """The optimizer's state was set on purpose."""
        if self.step_probe is not None:
            self.step_probe.forget()

    def finish_minibatch(self, discard: bool) -> float:
        """Step the optimizer, unless the minibatch is discarded, and clear the gradients. Returns
        the learning rate of this optimizer step. Raises UpdateStopped: the ranks were asked to
        stop, and the step has changed nothing."""
        # The scheduler then sets that of the next step.
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.step_finding = StepFinding()
        if not discard:
            stops.before_optimizer_step()
            self.device_state.load("optimizer")
            # A part of the model that no forward pass has waited for may still be gathering.
            self.parameter_gather.finish()
            assert self.step_probe is not None
            self.step_probe.before()
            self.optimizer.step()
            found = self.step_probe.after(lr, self._norm)
            wrong = self._gradient_finding
            self.step_finding = wrong if wrong.kind else found
            self.parameter_gather.begin()
            self.scheduler.step(1)
        self.clear_gradients()
        return lr

    def clear_gradients(self) -> None:
        for one in self.models:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()
