"""Queries to an engine's vLLM workers after their start, and their evaluation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any


def unlink_worker_segments(worker: Any) -> None:
    """Runs in a vLLM worker: remove the names of the shared memory through which a CPU engine's
    workers communicate.

    vLLM leaves the names behind at its end. All workers have opened the segments by now, so the
    names are not needed, and the memory is freed with the last worker, however it ends.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/vllm_dist_" in line}
    for path in paths:
        # Another worker may have removed it first.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def cached_blocks(engine: Any) -> int:
    """Number of blocks of keys and values that vLLM's ``LLMEngine`` keeps for other requests."""
    scheduler = engine.engine_core.engine_core.scheduler
    return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def cache_tokens(engine: Any) -> int:
    """Tokens that the KV cache of vLLM's ``LLMEngine`` holds."""
    cache = engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks) * int(cache.block_size)


def gpu_uuid(worker: Any) -> str:
    """Runs in a vLLM worker: the GPU that it computes on."""
    from rlmath.device.nvidia import current_gpu_uuid

    return current_gpu_uuid()


def worker_gpu(worker: Any) -> int:
    """Runs in a vLLM worker: the number of its GPU on the node."""
    from vllm.platforms import current_platform

    number: int = current_platform.visible_device_id_to_physical_device_id(worker.device.index)
    return number


def bind_worker_to_gpu(worker: Any) -> None:
    """Runs in a vLLM worker: bind it to the cores near its GPU."""
    from rlmath.device.numa import bind_to_gpu

    bind_to_gpu(worker.device.index)


def worker_kv_cache_bytes(worker: Any) -> int | None:
    """Runs in a vLLM worker: memory left for the KV cache by profiling; ``None`` on CPU."""
    found: int | None = getattr(worker, "available_kv_cache_memory_bytes", None)
    return found


def smallest(sizes: Sequence[int | None]) -> int | None:
    """The size that fits all ranks, as in vLLM; ``None`` if one was not measured."""
    known = [size for size in sizes if size is not None]
    return int(min(known)) if known and len(known) == len(sizes) else None


def check_gpus(found: Sequence[int], assigned: Sequence[int] | None, names: Sequence[str]) -> None:
    """Compare the GPUs that an engine's workers use with those that were reserved for it. Raises
    RuntimeError: a worker uses a different GPU, which another engine or Megatron rank may use.

    Args:
        found: Number of each worker's GPU on the node.
        assigned: Numbers of the reserved GPUs, as vLLM interpreted ``names``.
    """
    if assigned is None or list(found) != list(assigned)[: len(found)]:
        raise RuntimeError(
            f"the engine was given the GPUs {', '.join(names)} of its node (numbers {assigned}), "
            f"but its workers use {list(found)}; this version of vLLM places workers "
            "differently; use the version in requirements/"
        )
