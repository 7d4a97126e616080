"""Writes the tensors of all ranks in torch's distributed format.

Megatron's own writer starts a manager process and forks writers, for writing in the background.
In a Ray actor, a process with threads that hold locks, forking can hang. So the plan is made with
Megatron's planner, and torch's writer writes it: in the calling process if the model is small, so
that writing takes less than starting an interpreter, or in a child process beside training
(:mod:`rlmath.checkpoint.child_writer`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlmath.checkpoint.digests import hashed_stream
from rlmath.checkpoint.space import is_disk_full

if TYPE_CHECKING:
    from rlmath.checkpoint.child_writer import ChildWriter

COMMON = "common.pt"
# The system's messages in lower case; other ranks get only the text of an error.
DISK_FULL = ("no space left on device", "disk quota exceeded")


def write_tensors(folder: Path, sharded: Any, group: Any, child: ChildWriter | None = None) -> None:
    """Write the shards that this rank is the main holder of; collective over ``group``. Raises
    OSError on every rank: one could not write.

    Args:
        sharded: Megatron's sharded state, without its common part.
        group: A gloo group of all ranks; nothing else may use it meanwhile.
        child: Writes the tensors, which are in its memory; ``None``: this process does.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    flat, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(
        sharded, keep_only_main_replica=True
    )
    planner = strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    try:
        save(
            strategy.mcore_to_pyt_state_dict(flat, False),
            storage_writer=checkpoint_writer(folder, child),
            planner=planner,
            process_group=group,
        )
    except CheckpointException as failed:
        causes = {rank: error for rank, (error, _) in failed.failures.items()}
        reasons = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(causes.items()))
        raise OSError(f"{folder} could not be written: {reasons}") from None


def checkpoint_writer(folder: Path, child: ChildWriter | None = None) -> Any:
    """Torch's writer of a folder, with checksums; see :func:`write_tensors`."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem

    class Hashed(FileSystem):
        """Records checksums of the ranks' files; the driver writes and renames ``.metadata``."""

        def create_stream(self, path: Any, mode: str) -> Any:
            if mode == "wb" and Path(path).suffix == DEFAULT_SUFFIX:
                return hashed_stream(Path(path))
            return super().create_stream(path, mode)

    class Writer(FileSystemWriter):
        """Raises plain errors, since an error loses its cause on the way to other ranks."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            if child is not None:
                written: torch.futures.Future[Any] = torch.futures.Future()
                written.set_result(child.write(folder, plan, planner))
                return written
            # Zip's checksum takes longer than writing; the file's checksum replaces it.
            is_on = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                raise _plain(error) from None
            finally:
                torch.serialization.set_crc32_options(is_on)

        def finish(self, metadata: Any, results: Any) -> None:
            try:
                super().finish(metadata, results)
            except Exception as error:
                raise _plain(error) from None

    # One thread: torch drops the errors of the others.
    writer = Writer(folder, thread_count=1, sync_files=True, overwrite=True)
    writer.fs = Hashed()
    return writer


def _plain(error: Exception) -> OSError:
    return OSError(DISK_FULL[0] if is_disk_full(error) else f"{type(error).__name__}: {error}")


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """On rank 0, write the values equal on all ranks, and the file that names the format."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    try:
        torch.save(common, folder / COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    except Exception as error:
        raise _plain(error) from None


def background_group() -> Any:
    """A gloo group of all ranks for the checkpoint alone; the first call is collective."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]


_group: tuple[Any, Any] | None = None
