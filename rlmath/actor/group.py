"""The driver's side of the Megatron ranks: calls all of them and joins their results."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rlmath.actor.communicators import describe
from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_calls import ActorError, RankCalls
from rlmath.actor.rank_step import StepResult
from rlmath.actor.settings import ActorSettings, StartedRank, shard_settings
from rlmath.actor.stops import ask_to_stop
from rlmath.actor.token_values import assemble
from rlmath.actor.worker import ActorWorker
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.alignment import Alignment
from rlmath.batching.shards import Sequences, shards
from rlmath.cluster.nsys import under_nsys
from rlmath.cluster.processes import ProcessPlace, end_actors
from rlmath.cluster.watchdog import Process, WatchedComponent
from rlmath.device.environment import rank_environment
from rlmath.device.flight_recorder import remove_records
from rlmath.device.residue import Residue
from rlmath.engines.transport import transport_named
from rlmath.errors import UpdateStopped, UserError
from rlmath.model.parallel import Layout
from rlmath.types import TrainingBatch
from rlmath.utils.sizes import in_words

if TYPE_CHECKING:
    from rlmath.config.profile import ProfileTool
    from rlmath.engines.transports import TransportPlan
    from rlmath.weights.gather import WeightChanges
    from rlmath.weights.slices import WeightSlice


# Maximum number of lines about ready ranks at a start.
START_LINES = 8
# Time to write traces after a failure.
ABANDON_S = 10.0
# Longest time after which a shared file system shows a file that another node has made.
VISIBLE_S = 70.0


class ActorGroup:
    """All Megatron ranks, as Ray actors. A context manager; ``start`` is called on entry.

    Args:
        settings: Model, optimizer and further settings of each rank.
        layout: How the ranks share model and data.
        device: ``cpu`` or ``cuda``.
        seed: Seed of Megatron's random streams.
        num_threads: Threads of one CPU operator in a rank; ``None`` on CUDA: its share of the cores
            beside its GPU.
        log_dir: Folder for each rank's output.
        actor_options: Ray options of each rank (its place, its GPU); none: anywhere.
        shares_gpus: Whether engines are on the ranks' GPUs.
        nsys_folder: Folder of reports of Nsight Systems, under which the ranks run; ``None``: they
            do not.
    """

    def __init__(
        self,
        settings: ActorSettings,
        layout: Layout,
        *,
        device: str,
        seed: int,
        num_threads: int | None,
        log_dir: str,
        actor_options: Sequence[Mapping[str, Any]] | None = None,
        shares_gpus: bool = False,
        nsys_folder: Path | None = None,
    ) -> None:
        self.settings, self.layout, self._device = settings, layout, device
        self._shares_gpus, self._nsys_folder = shares_gpus, nsys_folder
        self._seed, self._num_threads = seed, num_threads
        self._calls = RankCalls(log_dir)
        self._options = actor_options or [{}] * layout.world_size
        self._workers: list[Any] = []
        self._starting: list[Any] = []
        self._places: list[Any] = []
        # Data-parallel rank of each worker, and the sequences of each data-parallel rank's shard.
        self._dp: list[int] = []
        self._shares: list[Tensor] = []
        # Whether an update has begun; the loop resets it when the step is recorded.
        self.changed = False
        # Address of the ranks' store, once it listens.
        self._store_place: tuple[str, int] | None = None

    def launch(self) -> None:
        """Begin to start the ranks and return at once, so that other parts start meanwhile."""
        environment = rank_environment(
            self._device,
            num_threads=self._num_threads,
            layout=self.layout,
            batch_invariant=self.settings.model.precision.batch_invariant,
            shares_gpus=self._shares_gpus,
            log_dir=self._calls.log_dir,
        )
        remove_records(self._calls.log_dir)
        for rank, options in enumerate(self._options):
            worker = ray.remote(ActorWorker).options(
                **{
                    "num_cpus": 0,
                    "max_restarts": 0,
                    "runtime_env": self._runtime_env(rank, environment),
                    **options,
                }
            )
            self._workers.append(worker.remote(rank, self._calls.log_path(rank), environment))
        self._places = [worker.place.remote() for worker in self._workers]
        place = self._calls.results([self._workers[0].rendezvous.remote()], "rendezvous")[0]
        self._store_place = place
        self._starting = [
            worker.start.remote(
                self.settings, self.layout, self._device, place, self._seed, self._num_threads
            )
            for worker in self._workers
        ]

    def _runtime_env(self, rank: int, variables: dict[str, str]) -> dict[str, Any]:
        if self._nsys_folder is None:
            return {"env_vars": variables}
        return under_nsys(self._nsys_folder / f"rank_{rank}", variables)

    def wait_until_ready(self, say: Callable[[str], Any] | None = None) -> None:
        """Wait for the starts that ``launch`` began. ``say``: takes a line for each ready rank, or
        for each eighth of many. Raises UserError: the model cannot be built or read; ActorError: a
        rank failed in another way."""
        world, ready = self.layout.world_size, 0

        def one_is(rank: int, started: StartedRank) -> None:
            nonlocal ready
            ready += 1
            another = ready * START_LINES // world > (ready - 1) * START_LINES // world
            if say is not None and another:
                say(
                    f"{ready} of {world} ranks have their weights (rank {rank}: "
                    f"{in_words(started.weights_bytes)}, read in {started.read_s:.1f} s)"
                )

        started = self._calls.results(self._starting, "start", one_is)
        self._check_shared_folder()
        self._dp = [one.data_parallel_rank for one in started]
        self._starting = []
        if say is not None:
            for line in describe([one.communicators for one in started]):
                say(line)

    def _check_shared_folder(self) -> None:
        """Look for each rank's output, before a checkpoint is written beside it. Raises UserError:
        the run's folder is not shared by all nodes."""
        until_s = time.monotonic() + VISIBLE_S
        for rank in range(self.layout.world_size):
            log = Path(self._calls.log_path(rank))
            while not log.exists():
                if time.monotonic() > until_s:
                    raise UserError(
                        f"{log}, the output of rank {rank}, is not there on {socket.gethostname()}:"
                        " runner.run_dir has to be on a file system that all nodes share"
                    )
                time.sleep(1.0)

    def log_probs(
        self, batch: TrainingBatch, name: str = "policy", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[R]`` of a batch other than the step's. ``name``: name of the
        forward pass; see :func:`rlmath.actor.passes.forward_passes`. ``seed``: seed of random draws
        in the pass."""
        dealt = list(shards(batch, shard_settings(self.settings, self.layout)))
        calls = self._of_shards("log_probs", [ray.put(one) for one in dealt], name, seed)
        by_rank = dict(x for x in zip(self._dp, calls, strict=True) if x[1] is not None)
        found = [by_rank[i] for i in range(len(dealt))]
        return assemble(found, [one.places for one in dealt], batch.response_lengths)

    def run_part(self, sequences: Sequences, plan: StepPlan) -> Alignment | None:
        """Shard a step's sequences over the data-parallel ranks, which keep them, and run the
        forward passes over them. See ``RankStep.run_passes``. ``sequences``: sequences to train on.
        ``plan``: the step's plan."""
        self._shares, refs = [], []
        for shard in shards(sequences, shard_settings(self.settings, self.layout, plan)):
            self._shares.append(shard.places)
            refs.append(ray.put(shard))
        found = [x for x in self._of_shards("run_part", refs, plan) if x is not None]
        return Alignment.join(found) if found else None

    def finish_step(
        self, plan: StepPlan, advantages: SequenceAdvantages | None = None
    ) -> StepResult:
        """Run advantages and updates on the sequences of :meth:`run_part`. Raises UpdateStopped:
        the ranks were asked to stop, and the step has changed nothing.

        Args:
            plan: The step's plan, with values that depend on the forward passes.
            advantages: Advantages from rewards alone, for all sequences of the step; ``None``: the
                batch has them, or a value model gives them.
        """
        own = [None if advantages is None else advantages.select(x) for x in self._shares]
        self.changed = True
        try:
            calls = [
                worker.finish_step.remote(plan, own[i])
                for worker, i in zip(self._workers, self._dp, strict=True)
            ]
            return StepResult.join(self._calls.results(calls, "finish_step"))
        except UpdateStopped:
            self.changed = False
            raise

    def ask_to_stop(self) -> None:
        """Make the ranks skip the rest of their present pass, unless the step has changed weights;
        see :mod:`rlmath.actor.stops`. Returns at once; the call of the pass raises.
        """
        asking = threading.Thread(target=self._ask_to_stop, name="ask-to-stop", daemon=True)
        asking.start()

    def _ask_to_stop(self) -> None:
        if self._store_place is None:
            return
        try:
            ask_to_stop(*self._store_place)
        except Exception as error:  # The run ends in any case, only later.
            print(f"the ranks cannot be asked to stop: {error}", file=sys.stderr, flush=True)

    def begin_profile(self, tool: ProfileTool, folder: Path) -> None:
        """Record on each rank, into an absolute folder, until :meth:`end_profile`."""
        self._all("begin_profile", tool, folder)

    def end_profile(self, after_failure: bool = False) -> list[str]:
        """Write the traces. Returns why there is none, for ranks that could not write theirs.
        ``after_failure``: wait for a limited time, as ranks that wait for a failed one never
        answer; nothing is returned."""
        calls = [worker.end_profile.remote() for worker in self._workers]
        if after_failure:
            ray.wait(calls, num_returns=len(calls), timeout=ABANDON_S)
            return []
        return [problem for problem in self._calls.results(calls, "end_profile") if problem]

    def renew_reference(self, share: float, clear_optimizer: bool) -> None:
        """Move the reference model a share of the way to the policy; see ``MegatronActor``."""
        self.changed = True
        self._all("renew_reference", share, clear_optimizer)

    def connect_engines(self, plan: TransportPlan) -> None:
        """Connect the ranks to the engines, which must be ready. ``plan``: plan with all engines;
        each rank gets the handles of those that it calls."""
        transport = transport_named(plan.transport, plan.options)
        plans = transport.of_ranks(plan, len(self._workers), lambda: self._all("gpu"))
        calls = [
            worker.connect_engines.remote(own)
            for worker, own in zip(self._workers, plans, strict=True)
        ]
        self._calls.results(calls, "connect_engines")

    def send_weights(self, version: int) -> None:
        """Send the present weights to all engines, and wait until they have them."""
        self._all("send_weights", version)

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        """Fingerprints of the engines' expected Hugging Face tensors, or of a slice of them."""
        found: dict[str, int] = self._all("weights_fingerprints", part)[0]
        return found

    def weights_changes(self) -> list[WeightChanges]:
        """:meth:`weights_fingerprints` of each copy of the model, on its first rank; others have
        none. And the tensors unchanged on each rank since the last call."""
        return self._all("weights_changes")

    def save_hf(self, folder: str | Path, adapters: str | Path | None = None) -> None:
        """Write the model as a Hugging Face folder, with the other files of its source folder.
        ``adapters``: folder for the adapters, in PEFT's format; only with ``ActorSettings.lora``.
        """
        of_adapters = None if adapters is None else _on_any_node(adapters)
        self._all("save_hf", _on_any_node(folder), self.settings.model_path, of_adapters)

    def save_checkpoint(self, folder: str | Path, *, in_background: bool = False) -> None:
        """Write model, optimizer, schedule and random states to a folder. ``in_background``: return
        when they are copied; :meth:`checkpoint_written` follows."""
        self._all("save_checkpoint", _on_any_node(folder), in_background)

    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether all ranks have written the checkpoint that ``save_checkpoint`` began. ``wait``:
        until they have. Raises DiskFull: it could not be written."""
        if not wait and not all(self._all("checkpoint_written")):
            return False
        self._all("finish_checkpoint")
        return True

    def load_checkpoint(self, folder: str | Path) -> None:
        self._all("load_checkpoint", _on_any_node(folder))

    def begin_room(self) -> list[Residue]:
        """See :meth:`rlmath.actor.worker.ActorWorker.begin_room`; empty if nothing is
        offloaded."""
        return [] if self.settings.offload == "none" else self._all("begin_room")

    def make_room(self, part: str, meanwhile: Callable[[], None] | None = None) -> list[Residue]:
        """Move memory to the host as ``actor.offload`` says, before engines take memory for
        ``weights`` or ``kv_cache``; see :meth:`rlmath.actor.worker.ActorWorker.make_room`.

        Args:
            part: ``weights`` or ``kv_cache``.
            meanwhile: Called while the ranks are moving memory. If it fails, its error is raised
                after they are done.

        Returns:
            Remaining memory of each rank; empty if nothing is offloaded.
        """
        offloads = self.settings.offload != "none"
        calls = [w.make_room.remote(part) for w in self._workers] if offloads else []
        try:
            if meanwhile is not None:
                meanwhile()
        except Exception as error:
            try:
                self._calls.results(calls, "make_room")
            except (ActorError, UserError) as of_ranks:
                error.add_note(str(of_ranks))
            raise
        return self._calls.results(calls, "make_room")

    def begin_load(self) -> None:
        """Bring back the weights that ``actor.offload`` moved to host memory, for the next passes;
        returns at once. A later call raises errors."""
        if self.settings.offload == "all":
            calls = [worker.load_parameters.remote() for worker in self._workers]
            self._calls.await_later(calls, "load_parameters")

    def release_cached_memory(self) -> list[Residue]:
        """Make each rank return memory that it caches, for engines on its GPU. Returns the
        remaining memory of each rank."""
        return self._all("release_cached_memory")

    def call(self, function: Callable[[ActorWorker], Any]) -> list[Any]:
        """Results of ``function(worker)`` in each rank's process, in order of rank, for what no
        method offers."""
        return self._all("__ray_call__", function)

    def take_peaks(self) -> dict[str, int]:
        """Highest memory of any rank in bytes, by phase, since the last call; see
        ``ActorWorker.take_peaks``."""
        found: dict[str, int] = {}
        for one in self._all("take_peaks"):
            for phase, peak in one.items():
                found[phase] = max(found.get(phase, 0), peak)
        return found

    def shutdown(self) -> None:
        """End all ranks at once, whatever they are doing: nothing outlives their processes."""
        workers, self._workers = self._workers, []
        end_actors(workers, self._process_places() or [None] * len(workers))
        self._places = []

    def watchdog_probe(self) -> WatchedComponent:
        """A watchdog component for the pending call and its ranks."""

        def waiting_on() -> list[str]:
            method, ranks = self._calls.waiting_on
            return [f"Megatron rank {rank}, which is in {method}" for rank in ranks]

        def processes() -> list[Process]:
            return [
                Process(f"Megatron rank {rank}", self._calls.log_path(rank), place)
                for rank, place in enumerate(self._process_places())
            ]

        return WatchedComponent(self._calls.progress, waiting_on, processes)

    def _process_places(self) -> list[ProcessPlace | None]:
        places: list[ProcessPlace | None] = []
        for ref in self._places:
            try:
                places.append(ray.get(ref, timeout=0.2))
            except (RayError, GetTimeoutError):
                places.append(None)
        return places

    def __enter__(self) -> ActorGroup:
        self.launch()
        self.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._calls.results(
            [getattr(w, method).remote(*arguments) for w in self._workers], method
        )

    def _of_shards(self, method: str, refs: Sequence[Any], *arguments: Any) -> list[Any]:
        """Results in order of rank, when each rank gets its shard's ref."""
        calls = [
            getattr(worker, method).remote(refs[i], *arguments)
            for worker, i in zip(self._workers, self._dp, strict=True)
        ]
        return self._calls.results(calls, method)


def _on_any_node(folder: str | Path) -> str:
    """A folder's path for the ranks. They run where their node's Ray was started: a relative path
    would be another folder there."""
    return str(Path(folder).absolute())
