"""Engines beside ranks: the GPUs that they really use, their KV caches, and two starts alike."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.device.nvidia import current_gpu_uuid, process_counts
from rlmath.engines.protocol import Engine
from rlmath.types import Sample

SAMPLES = 32
# Largest relative difference of the KV cache between engines, and between starts.
MOST_DIFFERENCE = 0.02
# A rank and an engine's worker.
PROCESSES_PER_GPU = 2


def run(node: Node, record: Record) -> None:
    """Start engines of one rank twice, with ranks beside them and without, and engines of two."""
    # More GPUs than four show nothing that two engines of two ranks do not.
    gpus = node.gpus_up_to(4)
    caches: dict[str, list[int]] = {}
    samples: dict[str, list[Sample]] = {}
    wanted = parts.requests(node, SAMPLES)
    starts = [("TP 1", 1, True), ("TP 1 again", 1, False), ("TP 2", 2, True)]
    if not node.on_cuda:
        record.not_applicable("GPUs of ranks and engines", "there is no GPU")
    for name, width, trains in starts:
        if node.on_cuda and gpus < width:
            record.not_applicable(name, f"it needs {width} GPUs, there is {gpus}")
            continue
        overrides = [f"rollout.tensor_parallel={width}"]
        config = parts.settings(node, name.replace(" ", "_"), gpus, overrides)
        with contextlib.ExitStack() as stack:
            actor = None
            if trains:
                actor, pool = stack.enter_context(parts.start(config, record, name))
            else:
                pool = stack.enter_context(parts.started_engines(config, record, name))
            caches[name] = pool.ask(Engine.kv_cache_tokens)
            record.figure(f"{name} KV cache", min(caches[name]), "tokens", key=True)
            if node.on_cuda:
                ranks = [] if actor is None else actor.call(gpu_of)
                _gpus(record, name, width, ranks, pool.ask(Engine.gpus))
            samples[name] = parts.sample(pool, wanted)
        _same_caches(record, name, caches[name], "its engines")
        lengths = {len(one.token_ids) for one in samples[name]}
        record.require(
            lengths == {parts.RESPONSE_TOKENS},
            f"{name}: {parts.RESPONSE_TOKENS} tokens were asked for, responses have {lengths}",
        )
    _same_caches(record, "TP 1", caches["TP 1"] + caches["TP 1 again"], "two starts")
    _deterministic(node, record, samples["TP 1"], samples["TP 1 again"])


def gpu_of(worker: Any) -> str:
    return current_gpu_uuid()


def _gpus(
    record: Record, name: str, width: int, ranks: list[str], engines: list[list[str]]
) -> None:
    """Engine ``i`` has to use the GPUs of ranks ``i * width`` and the next ones, and nothing else.
    ``ranks``: the GPU of each rank; none: there are no ranks. ``engines``: the GPU of each worker
    of each engine."""
    for index, workers in enumerate(engines):
        record.figure(f"{name} engine {index} GPUs", ", ".join(workers))
        own = ranks[index * width : (index + 1) * width]
        record.require(
            not ranks or sorted(own) == sorted(workers),
            f"{name}: engine {index} uses {', '.join(workers)}, but its ranks use {', '.join(own)}",
            "Report this with the file: engines and ranks would not share GPUs, and memory would "
            "not suffice. cluster.placement=separate may work until it is fixed.",
        )
    used = [gpu for workers in engines for gpu in workers]
    record.require(
        len(set(used)) == len(used),
        f"{name}: {len(used)} workers of engines share {len(set(used))} GPUs",
    )
    counts = process_counts()
    if not counts:
        record.not_applicable(f"{name} processes on each GPU", "the driver shows none here")
    for gpu, count in counts.items():
        record.figure(f"{name} processes on {gpu}", count, limit=f"<= {PROCESSES_PER_GPU}")
        record.require(
            count <= PROCESSES_PER_GPU,
            f"{name}: {count} processes compute on {gpu}; a rank and an engine's worker are "
            f"{PROCESSES_PER_GPU}",
            "Look with nvidia-smi whose they are: others' processes, or an engine's context on a "
            "GPU that is not its own.",
        )


def _same_caches(record: Record, name: str, tokens: list[int], of_what: str) -> None:
    low, high = min(tokens), max(tokens)
    record.require(
        low >= (1 - MOST_DIFFERENCE) * high,
        f"{name}: KV caches of {of_what} hold {low:,} to {high:,} tokens",
        "Memory was measured while something else took some: end other processes on the GPUs.",
    )


def _deterministic(node: Node, record: Record, first: list[Sample], second: list[Sample]) -> None:
    pairs = list(zip(first, second, strict=True))
    same = sum(np.array_equal(one.token_ids, other.token_ids) for one, other in pairs)
    record.figure(
        "samples equal in two starts",
        f"{same} of {len(pairs)}",
        limit="not promised on GPUs without precision.batch_invariant" if node.on_cuda else "all",
        key=True,
    )
    record.require(
        same == len(pairs) or node.on_cuda,
        f"{len(pairs) - same} of {len(pairs)} samples differ between two starts with the same "
        "seeds",
        "A resumed run would not repeat its samples; training is right all the same.",
    )
