"""The Ray actor that hosts one Megatron rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlmath.cluster.logs import send_output_to
from rlmath.cluster.processes import ProcessPlace, own_place
from rlmath.cluster.watchdog import write_stacks_on_signal
from rlmath.device.nvidia import current_gpu_uuid
from rlmath.device.phases import phase
from rlmath.device.residue import Residue
from rlmath.utils.child_processes import end_with_parent
from rlmath.utils.paused_collector import paused_collector

if TYPE_CHECKING:
    from pathlib import Path

    from rlmath.actor.plan import StepPlan
    from rlmath.actor.rank_step import StepResult
    from rlmath.actor.settings import StartedRank
    from rlmath.algorithms.advantages import SequenceAdvantages
    from rlmath.algorithms.alignment import Alignment
    from rlmath.batching.shards import Shard
    from rlmath.config.profile import ProfileTool
    from rlmath.weights.gather import BucketGatherer, WeightChanges
    from rlmath.weights.slices import WeightSlice

log = logging.getLogger(__name__)

# The value model's folder in a checkpoint.
VALUE_MODEL = "value_model"


class ActorWorker:
    """One rank, in a separate process. ``start`` imports torch and Megatron."""

    # For the connected engines: the source of adapters, sent instead of the gatherer's weights if
    # engines take adapters alone.
    adapter_source: Any = None
    # Whether the connected engines quantize the weights that they receive.
    quantized = False
    # GPU memory that the rank's communicators took when it joined the others.
    communicator_bytes = 0
    # Weights that must not change, see rlmath.training.checks.still_weights.
    frozen_weights: Any = None

    def __init__(self, rank: int, log_path: str, environment: dict[str, str]) -> None:
        end_with_parent(os.getppid())
        os.environ.update(environment)
        self.rank = rank
        self._profile = contextlib.ExitStack()
        send_output_to(log_path)
        write_stacks_on_signal()

    def place(self) -> ProcessPlace:
        return own_place()

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port of this process's host, at which rank 0 is found."""
        import ray

        address = ray.util.get_node_ip_address()
        # Held for the ranks' store, which shares it: until it listens, after seconds of imports,
        # the system could give the port to another process.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((address, 0))
        return address, int(self._held.getsockname()[1])

    def start(
        self,
        settings: Any,
        layout: Any,
        device: str,
        rendezvous: tuple[str, int],
        seed: int,
        num_threads: int | None,
    ) -> StartedRank:
        """Join the other ranks and load this one's part of the model. Collective."""
        import ray

        with paused_collector():
            from rlmath.device import choose_platform

            platform = choose_platform(device, settings.model.layers)
            platform.prepare_megatron_process(local_rank=0, num_threads=num_threads)
            from rlmath.actor.communicators import open_communicators
            from rlmath.actor.parallel import initialize, wait_for_disks
            from rlmath.actor.policy import MegatronActor
            from rlmath.actor.settings import StartedRank
            from rlmath.actor.stops import stops

            address, port = rendezvous
            own = ray.util.get_node_ip_address()
            initialize(layout, platform, self.rank, address, port, seed, node_address=own)
            communicators = open_communicators(layout, platform)
            wait_for_disks()
            stops.connect(address, port, self.rank, layout.world_size)
            self.actor = MegatronActor(settings, layout, platform)
            _check_and_release(self.actor)
            self.value_model: Any = None
            if settings.value is not None:
                from rlmath.actor.value import ValueModel

                self.value_model = ValueModel(settings.value, layout, platform)
                _check_and_release(self.value_model)
        self.platform = platform
        self.communicator_bytes = communicators.device_bytes or 0
        self._peaks: dict[str, int] = {}
        self.connection: Any = None
        self.gatherer: Any = None
        return StartedRank(
            self.actor.dp_rank,
            sum(p.numel() * p.element_size() for p in self.actor.module.parameters()),
            self.actor.read_s,
            communicators,
        )

    def log_probs(self, shard: Shard, name: str, seed: int) -> Any:
        """Values of a shard other than the step's, from the rank that reports; see
        :meth:`rlmath.actor.policy.MegatronActor.shard_log_probs`."""
        values = self.actor.shard_log_probs(shard, name, seed)
        return values if self.actor.reports else None

    def _note_peak(self, phase: str) -> None:
        """Record the peak memory of a phase that ends here."""
        self._peaks[phase] = max(self._peaks.get(phase, 0), self.platform.take_peak_bytes())

    def take_peaks(self) -> dict[str, int]:
        """Highest memory of this rank in bytes, by phase, since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    @phase("log_probs")
    def run_part(self, shard: Shard, plan: StepPlan) -> Alignment | None:
        """Keep this rank's shard of a step, and run the plan's forward passes over it; see
        :meth:`rlmath.actor.rank_step.RankStep.run_passes`."""
        self._note_peak("between_updates")
        from rlmath.actor.rank_step import RankStep
        from rlmath.actor.stops import stops

        stops.begin_step()
        self.step = RankStep(self.actor, self.value_model, shard)
        found = self.step.run_passes(plan)
        self._note_peak("log_probs")
        return found

    @phase("update")
    def finish_step(self, plan: StepPlan, advantages: SequenceAdvantages | None) -> StepResult:
        """Compute advantages, unless the batch has them, and the updates; this rank's results.
        ``plan``: the step's plan, with values that depend on the forward passes. ``advantages``:
        see :meth:`rlmath.actor.rank_step.RankStep.add_advantages`."""
        from rlmath.actor.rank_step import StepResult

        tokens = values = policy = None
        if self.step.shard.batch.advantages is None:
            tokens = self.step.add_advantages(plan, advantages)
        if plan.values:
            try:
                values = self.step.update_values(plan)
            finally:
                self._note_peak("update_values")
                self.value_model.release()
                self.platform.release_cached_memory()
        if plan.policy:
            try:
                policy = self.step.update(plan)
            finally:
                self._note_peak("update")
                # The copies run until engines take memory; see make_room.
                self.actor.begin_release(self.platform.release_cached_memory)
        return StepResult(tokens, values, policy)

    def begin_profile(self, tool: ProfileTool, folder: Path) -> None:
        """Record from here to :meth:`end_profile`."""
        from rlmath.actor.profiling import recording

        self.end_profile()
        self._profile = contextlib.ExitStack()
        self._profile.enter_context(recording(tool, folder, self.rank))

    def end_profile(self) -> str:
        """Stop recording and write the trace. Returns why there is none; empty: it is written, or
        nothing was recorded."""
        profile, self._profile = self._profile, contextlib.ExitStack()
        try:
            profile.close()
        except Exception as error:  # A full disk, for example, which the run may outlive.
            return f"rank {self.rank}: {type(error).__name__}: {error}"
        return ""

    def renew_reference(self, share: float, clear_optimizer: bool) -> None:
        """Renew the reference; see :meth:`rlmath.actor.policy.MegatronActor.renew_reference`."""
        self.actor.renew_reference(share, clear_optimizer)

    def gpu(self) -> str:
        """UUID of this rank's GPU."""
        return current_gpu_uuid()

    def connect_engines(self, plan: Any) -> None:
        """Connect to the engines, after shutting down an earlier connection. Collective."""
        from rlmath.engines.transports.connection import connect

        self._disconnect_engines()
        self.gatherer = self._gatherer(bucket_size_mib=plan.bucket_size_mib)
        self.adapter_source = self._adapter_source(plan) if plan.adapters else None
        self.quantized = plan.quantized
        source = self.gatherer if self.adapter_source is None else self.adapter_source.gatherer
        self.connection = connect(plan, source, self.platform)

    def _adapter_source(self, plan: Any) -> Any:
        from rlmath.weights.adapter_sync import AdapterSource

        lora = self.actor.settings.lora
        assert lora is not None
        return AdapterSource(
            self.actor.chunks,
            self.actor.spec,
            self.actor.parallel,
            lora,
            self.actor.device_state.read,
            plan.bucket_size_mib,
        )

    def _gatherer(self, **sizes: Any) -> Any:
        read = self.actor.device_state.read
        return self.actor.gatherer(**sizes, read=read, merge=self.actor.merger())

    def _disconnect_engines(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        try:
            connection.shutdown()
        except Exception:
            # Its engines may be gone. The new connection does not need the old one.
            log.warning("rank %d: the old connection to the engines", self.rank, exc_info=True)

    @phase("weight_sync")
    def send_weights(self, version: int) -> None:
        """Send the present weights to the engines, from host memory if they are there. Collective.
        Raises RuntimeError: there is no connection."""
        if self.connection is None:
            raise RuntimeError(
                f"rank {self.rank} is not connected to the engines: connect_engines was not called,"
                " or failed; call it again before weights are sent"
            )
        self.connection.send_weights(version)
        self._note_peak("weight_sync")
        self.platform.release_cached_memory()

    def release_cached_memory(self) -> Residue:
        """Free cached memory; see :meth:`rlmath.device.Platform.release_cached_memory`. Returns the
        remaining memory."""
        gc.collect()
        self.platform.release_cached_memory()
        return self._residue()

    def begin_room(self) -> Residue:
        """Begin to move memory to the host as ``actor.offload`` says; gradients are freed at once.
        Returns the memory in use until :meth:`make_room`."""
        if self.value_model is not None:
            self.value_model.release()
        self.actor.begin_release(self.release_cached_memory)
        return self._residue()

    def load_parameters(self) -> None:
        """Bring the policy's weights to the device, for the next phase."""
        self.actor.load_parameters()

    def make_room(self, part: str) -> Residue:
        """Move memory to the host as ``actor.offload`` says, before engines take memory for a part.
        ``part``: ``weights``: the policy's weights may stay, as they are sent next; ``kv_cache``:
        all moves. Returns the remaining memory."""
        if part == "kv_cache":
            self.actor.release()
        self.actor.release_optimizer()
        if self.value_model is not None:
            self.value_model.release()
        return self.release_cached_memory()

    def _residue(self) -> Residue:
        """Memory that this rank uses on its device now."""
        counted = sum(model.device_state.device_bytes() for model in self._models().values())
        reserved = self.platform.reserved_bytes()
        now = counted if reserved is None else reserved
        # NCCL's memory belongs neither to the allocator nor to another process.
        others, communicators = self.platform.bytes_of_others(), self.communicator_bytes
        return Residue(
            now + communicators,
            sum(model.device_state.host_bytes() for model in self._models().values()),
            None if others is None else max(0, others - communicators),
            max(0, self._peaks.get("update", 0) - now),
            communicators,
            self.platform.memory_bytes(),
        )

    def _models(self) -> dict[str, Any]:
        value = {} if self.value_model is None else {VALUE_MODEL: self.value_model}
        return {"actor": self.actor, **value}

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Keep weights on the device, and the optimizer's tensors where they are, to be read
        there."""
        with contextlib.ExitStack() as stack:
            for model in self._models().values():
                model.load_parameters()
                stack.enter_context(model.device_state.optimizer_readable())
            yield

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        """Fingerprints of the tensors that engines hold after a weight sync, or of a slice.
        Collective."""
        if self.adapter_source is not None:
            found: dict[str, int] = self.adapter_source.fingerprints(part)
            return found
        if self.gatherer is None:
            self.gatherer = self._gatherer()
        if self.quantized:
            from rlmath.weights.quantized_prints import sent_fingerprints

            return sent_fingerprints(self.gatherer, part)
        return self.gatherer.fingerprints(part)

    def weights_changes(self) -> WeightChanges:
        """Fingerprints of the model with its adapters merged, on the first rank of each copy, and
        this rank's parts unchanged since the last call. Collective."""
        if self.gatherer is None:
            self.gatherer = self._gatherer()
        changes: WeightChanges = self.gatherer.changes()
        if self.gatherer.ranks[0] != self.rank:
            # The same again: 1 MB of an MoE's 19,000 tensors, from each rank in each step.
            changes = dataclasses.replace(changes, fingerprints={})
        if (adapters := self._replicated_adapters) is not None and not changes.drifted:
            return dataclasses.replace(changes, drifted=adapters.find_drift())
        return changes

    @functools.cached_property
    def _replicated_adapters(self) -> BucketGatherer | None:
        """Compares the factors of adapters that tensor ranks share. Collective the first time."""
        actor = self.actor
        if actor.settings.lora is None or actor.layout.tensor_parallel == 1:
            return None
        return actor.gatherer(read=actor.device_state.read, adapters=actor.settings.lora)

    def save_hf(self, folder: str, source: str, adapters: str | None = None) -> None:
        """Write the model as a Hugging Face folder, and its adapters as a PEFT folder. Collective.
        ``source``: the source folder of the model. ``adapters``: folder for the adapters; ``None``:
        they are not written."""
        from rlmath.weights.megatron import save_to_hf
        from rlmath.weights.peft_folder import save_adapters

        self.actor.load_parameters()
        chunks, spec, parallel = self.actor.chunks, self.actor.spec, self.actor.parallel
        save_to_hf(self.actor.gatherer(merge=self.actor.merger()), spec, folder, source)
        if adapters is not None:
            lora = self.actor.settings.lora
            assert lora is not None
            save_adapters(chunks, adapters, source, spec, parallel, lora)

    @phase("save")
    def save_checkpoint(self, folder: str, in_background: bool = False) -> None:
        """Write model, optimizer, schedule and random states. Collective. ``in_background``: return
        when they are copied; :meth:`finish_checkpoint` waits until they are written."""
        from rlmath.checkpoint.state import begin_saves, save_model

        with self._readable():
            if in_background:
                self._pending = begin_saves(self._models(), folder)
            else:
                for name, model in self._models().items():
                    save_model(model, folder, name)
        self.platform.release_cached_memory()

    def checkpoint_written(self) -> bool:
        return self._pending.done()

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is written in the background, and raise its errors."""
        self._pending.result()

    def load_checkpoint(self, folder: str) -> None:
        """Load a checkpoint that ``save_checkpoint`` wrote under any layout. Collective."""
        from rlmath.actor.offload import PARTS
        from rlmath.checkpoint.state import load_model

        for name, model in self._models().items():
            model.device_state.load(*PARTS)
            load_model(model, folder, name)
            model.release()
            model.forget_steps()


def _check_and_release(model: Any) -> None:
    """Free a newly built model's memory for the engines; collective if it is trained."""
    if model.optimizer is not None:
        from rlmath.checkpoint.state import check_saveable

        check_saveable(model)  # While its parameters are there.
    model.release()
