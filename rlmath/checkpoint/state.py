"""The ranks' side: save a model so that training can resume, in this layout or another.

Every rank calls the same function with the same arguments. A checkpoint has weights, float32 main
parameters and Adam's moments (in the shape of the parameters, so that another tensor, pipeline or
data parallelism can reshard them), the step of the schedule, and each rank's random streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint.child_writer import ChildWriter
from rlmath.checkpoint.manifest import MANIFEST, BrokenCheckpoint, verify
from rlmath.checkpoint.model_state import is_extra_state, sharded_weights
from rlmath.checkpoint.optimizer_prints import check_prints, optimizer_prints, save_prints
from rlmath.checkpoint.optimizer_state import (
    load_optimizer_state,
    load_schedule_state,
    sharded_optimizer_state,
)
from rlmath.checkpoint.random_streams import load_streams, save_streams
from rlmath.checkpoint.reference_state import load_reference, sharded_reference, trained_names
from rlmath.checkpoint.space import disk_full
from rlmath.checkpoint.tensor_index import check_index
from rlmath.checkpoint.writer import DISK_FULL, background_group, write_common, write_tensors
from rlmath.device.host_memory import host_copies
from rlmath.errors import UserError
from rlmath.utils.daemon_threads import DaemonThreads

log = logging.getLogger(__name__)

_ABOUT = "about.json"


@dataclass(frozen=True)
class AdapterState:
    """Adapters of a frozen model; a checkpoint has them alone."""

    described: dict[str, Any]  # As JSON; a checkpoint of other adapters is an error.
    base_fingerprint: int  # Fingerprint of the frozen model, which a load does not replace.


@dataclass(frozen=True)
class ModelState:
    """Live objects, not copies, of a rank's model that a checkpoint reads and sets."""

    chunks: Sequence[Any]
    optimizer: Any  # Megatron's; None: the model is not trained.
    scheduler: Any  # Megatron's learning-rate schedule; None without an optimizer.
    spec: Any  # Dataclass of the model's sizes; a checkpoint of another model is an error.
    layout: Any  # Dataclass of the parallel layout.
    dtype: str  # Type of the weights: float32 or bfloat16.
    optimizer_kind: str | None  # distributed or plain; None without an optimizer.
    # Weights of the reference model in the order of the chunks' parameters; None: there is none to
    # save.
    reference: list[Tensor] | None = None
    reference_kind: str = "frozen"  # frozen unless reference is saved.
    # Parameters that want no gradient are not saved; None: all are.
    adapters: AdapterState | None = None


class Saveable(Protocol):
    def checkpoint_state(self) -> ModelState: ...


def check_saveable(model: Saveable) -> None:
    """Describe the weights as a save does, so that a model that cannot be saved fails at the start
    and not at its first checkpoint. Collective over all ranks. Raises CheckpointingException on
    rank 0: Megatron finds shards missing, or some twice."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    state = model.checkpoint_state()
    save_preprocess({name: _sharded_chunk(state, chunk) for name, chunk in _named_chunks(state)})


def save_model(model: Saveable, folder: str | Path, name: str = "actor") -> None:
    """Save a model with its optimizer, schedule and random streams; collective over all ranks.
    Raises UserError on every rank: the disk is full, or the folder cannot be written."""
    _prepare_save(model.checkpoint_state(), Path(folder) / name, free_group(), copy=False)()


def begin_saves(models: Mapping[str, Saveable], folder: str | Path) -> Future[None]:
    """Copy the state, and write it while training continues; collective over all ranks.

    Takes host memory of the size of the rank's part of the checkpoint until it is written. All
    models are copied before this returns, so they are of the same step, and are written one after
    the other, each by a child process. The checkpoint may be committed when the result is there on
    every rank.

    Args:
        models: By the name of their folder in the checkpoint.
        folder: From :meth:`CheckpointStore.begin`; the same on all nodes.

    Returns:
        Done when all ranks have written. Its ``result`` raises UserError on every rank: the disk is
        full, or the folder cannot be written.
    """
    group = free_group()
    prepared = [
        _prepare_save(model.checkpoint_state(), Path(folder) / name, group, copy=True)
        for name, model in models.items()
    ]

    def write() -> None:
        while prepared:  # The copies are freed once written.
            prepared.pop(0)()

    global _last
    _last = _thread.submit(write)
    return _last


def _prepare_save(state: ModelState, target: Path, group: Any, copy: bool) -> Callable[[], None]:
    """Write a model's small files and collect its tensors; the result writes those. Collective.
    ``copy``: whether the model may change before its tensors are written."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    rank = dist.get_rank()
    sharded: dict[str, Any] = {}
    common: dict[str, Any] = {}

    def make_folder() -> None:
        if rank == 0:
            target.mkdir(parents=True, exist_ok=True)

    def check_folder() -> None:
        if not target.is_dir():
            raise UserError(
                f"{target} was made on rank 0 and is not there on rank {rank}: runner.run_dir "
                "has to be on a file system that all nodes share"
            )

    def gather_state() -> None:
        nonlocal sharded, common
        sharded, common = save_preprocess(_sharded_state(state, loading=False))
        _split_writing(sharded)

    def write_small_files() -> None:
        if rank == 0:
            write_common(target, common)
            about = json.dumps(_about(state), indent=1)
            (target / _ABOUT).write_text(about + "\n", encoding="utf-8")
        save_streams(target, rank)
        if state.optimizer is not None:
            save_prints(target, rank, optimizer_prints(state.optimizer, state.scheduler))

    # Rank 0 alone checks that the shards cover all tensors.
    for action in (make_folder, check_folder, gather_state, write_small_files):
        _on_all_ranks(action, target, group)
    child = _copy_to_host(sharded) if copy else None
    return lambda: _on_all_ranks(
        lambda: write_tensors(target, sharded, group, child), target, group
    )


_thread = DaemonThreads(1, "checkpoint")
_last: Future[None] | None = None


def free_group() -> Any:
    """The gloo group of all ranks, once the last save has finished with it: messages of two saves
    must not mix. Whether that save succeeded is for its own ``result`` to report."""
    if _last is not None:
        wait([_last])
    return background_group()


def load_model(model: Saveable, folder: str | Path, name: str = "actor") -> None:
    """Set a model, its optimizer, schedule and random streams to saved ones; collective.

    In the layout of the checkpoint training resumes bit for bit. In another one the sums of
    parallel ranks round differently, and random streams, which belong to ranks, stay as they were
    seeded. The learning rate and Adam's other settings are those of ``model``, not the saved ones.

    Args:
        model: Built from the same model, with the same type and the same kind of optimizer.
        folder: A complete checkpoint, see :meth:`CheckpointStore.resume`.

    Raises:
        UserError: On every rank: it is of another model, or cannot be read. The model may be
            loaded in part then, and must not be used.
    """
    state, target = model.checkpoint_state(), Path(folder) / name
    group = free_group()
    saved: dict[str, Any] = {}

    def check() -> None:
        saved.update(_read_about(target))
        _check_same(state, saved, target)
        check_index(target)
        # The driver has verified the files on its node; the ranks divide those that they read.
        if (target.parent / MANIFEST).is_file():
            verify(target.parent, (dist.get_rank(), dist.get_world_size()), under=name)

    _on_all_ranks(check, target, group)

    def load() -> None:
        with _exchanging_by(group):
            _load(state, target, saved["layout"])

    _on_all_ranks(load, target, group)


@contextlib.contextmanager
def _exchanging_by(group: Any) -> Iterator[None]:
    """Let a load exchange its plans, and wait for what the other ranks read, in a group.

    Megatron names none, and torch takes that of all ranks: NCCL would end a rank that has read its
    part minutes before another.
    """
    from torch.distributed import checkpoint

    plainly: Any = checkpoint.load_state_dict
    replaced: Any = checkpoint
    replaced.load_state_dict = functools.partial(plainly, process_group=group)
    try:
        yield
    finally:
        replaced.load_state_dict = plainly


def _load(state: ModelState, target: Path, saved_layout: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    loaded = dist_checkpointing.load(
        _sharded_state(state, loading=True), str(target), strict=StrictHandling.RAISE_ALL
    )
    for name, chunk in _named_chunks(state):
        _set_weights(state, chunk, loaded[name])
    if state.optimizer is not None:
        load_optimizer_state(state.optimizer, loaded["optimizer"])
        load_schedule_state(state.scheduler, loaded["scheduler"])
    if state.reference is not None:
        for name, chunk, reference in _references(state):
            load_reference(chunk, reference, loaded[name])
    same_layout = saved_layout == _as_json(state.layout)
    if state.optimizer is not None:
        prints = optimizer_prints(state.optimizer, state.scheduler)
        check_prints(target, dist.get_rank(), prints, same_layout=same_layout)
    if same_layout:
        load_streams(target, dist.get_rank())
    else:
        log.info(
            "%s was saved in the layout %s; random streams stay as they were seeded",
            target,
            saved_layout,
        )


def _named_chunks(state: ModelState) -> Iterator[tuple[str, Any]]:
    """Each chunk with its name in a checkpoint, in which tensors have the names of any layout."""
    for index, chunk in enumerate(state.chunks):
        yield f"model{index if index else ''}", chunk


def _references(state: ModelState) -> Iterator[tuple[str, Any, list[Tensor]]]:
    """Each chunk with its part of the reference, and the name of that in a checkpoint."""
    left = list(state.reference or ())
    for index, chunk in enumerate(state.chunks):
        count = len(trained_names(chunk))
        yield f"reference{index if index else ''}", chunk, left[:count]
        left = left[count:]


def _sharded_state(state: ModelState, loading: bool) -> dict[str, Any]:
    sharded = {name: _sharded_chunk(state, chunk) for name, chunk in _named_chunks(state)}
    if state.optimizer is not None:
        model = sharded if len(sharded) > 1 else sharded["model"]
        optimizer = sharded_optimizer_state(state.optimizer, dict(model), loading)
        sharded["optimizer"] = optimizer
        sharded["scheduler"] = state.scheduler.state_dict()
    if state.reference is not None:
        for name, chunk, reference in _references(state):
            sharded[name] = sharded_reference(chunk, reference)
    return sharded


def _sharded_chunk(state: ModelState, chunk: Any) -> dict[str, Any]:
    model = sharded_weights(chunk)
    if state.adapters is not None:
        trained = set(trained_names(chunk))
        model = {key: value for key, value in model.items() if key in trained}
    return model


def _set_weights(state: ModelState, chunk: Any, weights: dict[str, Any]) -> None:
    result = chunk.load_state_dict(weights, strict=False)
    missing = [key for key in result.missing_keys if not is_extra_state(key)]
    if state.adapters is not None:
        missing = sorted(set(trained_names(chunk)).intersection(missing))
    if missing or result.unexpected_keys:
        raise BrokenCheckpoint(f"missing {missing}, unexpected {result.unexpected_keys}")


def _split_writing(sharded: Any) -> None:
    """Let each data-parallel rank write a part of the tensors that all of them hold."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.exchange_utils import (
        determine_main_replica_uniform_distribution,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        distribute_main_replicas_with_precomputed_distribution,
    )

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    plan = determine_main_replica_uniform_distribution(sharded, group)
    distribute_main_replicas_with_precomputed_distribution(sharded, group, plan)


def _copy_to_host(sharded: Any) -> ChildWriter:
    """Copy the values to host memory, so that training may continue with the tensors; the result
    writes the copies."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    written = [
        one
        for one in nested_values(sharded)
        if isinstance(one, ShardedTensor) and is_main_replica(one.replica_id)
    ]
    child = ChildWriter([one.data for one in written])
    copies = host_copies((one.data for one in written), child.memory.empty)
    for one, copy in zip(written, copies, strict=True):
        one.data = copy
    return child


def _about(state: ModelState) -> dict[str, Any]:
    """Properties that must match for a load, and the layout, which may differ."""
    return {
        "shape": _as_json(state.spec),
        "dtype": state.dtype,
        "optimizer": state.optimizer_kind,
        "reference": state.reference_kind,
        "lora": None if state.adapters is None else state.adapters.described,
        "base": None if state.adapters is None else state.adapters.base_fingerprint,
        "layout": _as_json(state.layout),
    }


def _as_json(described: Any) -> Any:
    """A dataclass as JSON returns it, with lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(described)))


def _read_about(target: Path) -> dict[str, Any]:
    path = target / _ABOUT
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}") from None
    return content


def _check_same(state: ModelState, saved: dict[str, Any], target: Path) -> None:
    own = _about(state)
    for key, setting in (
        ("shape", "model.path"),
        ("dtype", "model.dtype"),
        ("optimizer", "actor.distributed_optimizer"),
        ("reference", "algorithm.reference.kind"),
        ("lora", "actor.lora"),
        ("base", "model.path"),
    ):
        was: Any = saved[key]
        now = own[key]
        if key == "shape":
            differing = sorted(k for k in now if was.get(k) != now[k])
            was = ", ".join(f"{k}={was.get(k)}" for k in differing)
            now = ", ".join(f"{k}={now[k]}" for k in differing)
        if was == now:
            continue
        raise UserError(
            f"{target} was saved with {key} {was}, and this run has {now}; set {setting} as it "
            "was, or start again with runner.resume=never"
        )


def _on_all_ranks(action: Callable[[], None], target: Path, group: Any) -> None:
    """Run an action that may fail on one rank; if it does, fail on all ranks."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if error is None else str(error), group=group)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if not failed:
        return
    if any(mark in reason.lower() for reason in failed.values() for mark in DISK_FULL):
        raise disk_full(target)
    if error is not None and not isinstance(error, UserError | OSError):
        raise error
    distinct = dict.fromkeys(failed.values())
    raise UserError(f"{target} (ranks {sorted(failed)}): {'; '.join(distinct)}")
