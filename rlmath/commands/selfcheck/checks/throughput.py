"""Speed of what engines take part in: decoding, against vLLM's own loop in the same process, weight
syncs, and a checkpoint."""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rlmath.actor.group import ActorGroup
from rlmath.commands.plan.gpus import Efficiency
from rlmath.commands.plan.time import Work, decoding
from rlmath.commands.plan.weight_sync import planned_buckets, sync_time
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.config.schema import Config
from rlmath.engines.bare_vllm import bare_rates
from rlmath.engines.protocol import Engine
from rlmath.engines.requests import Request
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.weight_sync import sync_weights

# Requests and tokens of each.
WORK = {"cuda": (256, 512), "cpu": (16, 64)}
# The first round warms up; of the others the fastest counts.
ROUNDS = 3
# Least share of vLLM's own throughput; with less, the engine waits for something else.
LEAST_RATIO = 0.95
GIB = 2**30


def run(node: Node, record: Record) -> None:
    """One rank and one engine on one GPU; each part is recorded as soon as it is measured."""
    count, tokens = WORK[node.device]
    wanted = parts.requests(node, count, prompts=8, max_tokens=tokens)
    overrides = [
        f"rollout.max_response_tokens={tokens}",
        f"rollout.max_running_sequences={count}",
        "rollout.enforce_eager=false",
    ]
    config = parts.settings(node, "run", min(node.gpus, 1), overrides)
    spec = read_model_spec(node.model)
    with parts.start(config, record) as (actor, pool):
        with record.phase("decoding"):
            _decoding(node, record, spec, pool, wanted)
        with record.phase("weight sync"):
            _weight_sync(node, record, spec, config, actor, pool)
        pool.sleep()
        with record.phase("checkpoint"):
            _checkpoint(record, actor, Path(node.folder) / "checkpoint")


def _decoding(
    node: Node, record: Record, spec: ModelSpec, pool: RolloutPool, wanted: Sequence[Request]
) -> None:
    """The same requests by our engine, and by vLLM's loop over the same one."""
    count, tokens = len(wanted), wanted[0].max_tokens
    record.figure("requests", count)
    record.figure("tokens of each", tokens)
    rates = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        found = sum(len(one.token_ids) for one in pool.generate(wanted))
        rates.append(found / (time.perf_counter() - started_s))
        record.require(
            found == count * tokens, f"{found} of {count * tokens} tokens were generated"
        )
    rate = max(rates[1:])
    record.figure("decoding", rate, "tokens/s", key=True)
    record.figure("time of a step", 1e3 * count / rate, "ms")
    if node.card is not None:
        prompt = max(len(one.prompt_token_ids) for one in wanted)
        cache = float(pool.ask(Engine.kv_cache_tokens)[0])
        work = Work(count, 1, 1, prompt, tokens, tokens)
        planned = decoding(spec, 1, 1, cache, count, work, node.card, Efficiency())
        record.figure("planned decoding", planned.running / planned.step_s, "tokens/s")
    bare = pool.call_engines(functools.partial(bare_rates, requests=wanted, rounds=ROUNDS - 1))[0]
    for kind, of_rounds in bare.items():
        record.figure(f"vLLM alone, {kind}", max(of_rounds), "tokens/s")
    ratio = rate / max(bare["same sampling"])
    limit = f">= {LEAST_RATIO:g}" if node.on_cuda else ""
    record.figure("engine / vLLM alone", ratio, limit=limit, key=True)
    record.require(
        ratio >= LEAST_RATIO or not node.on_cuda,
        f"{rate:,.0f} tokens/s are {ratio:.2f} of what vLLM gives alone, less than {LEAST_RATIO:g}",
    )


def _weight_sync(
    node: Node,
    record: Record,
    spec: ModelSpec,
    config: Config,
    actor: ActorGroup,
    pool: RolloutPool,
) -> None:
    """Weights to an engine that is awake; the first sync connects."""
    buckets = planned_buckets(spec, config, getattr(torch, node.dtype))
    num_bytes = sum(one.num_bytes for one in buckets)
    best_s = math.inf
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        sync_weights(actor, pool, pool.weights_version + 1)
        best_s = min(best_s, time.perf_counter() - started_s)
    record.figure("weight sync", best_s, "s")
    record.figure("weight sync rate", num_bytes / best_s / 1e9, "GB/s", key=True)
    if node.card is None:
        return
    planned = sync_time(
        spec,
        Layout(),
        weights_bytes=num_bytes,
        buckets=len(buckets),
        engine_tp=1,
        colocated=True,
        gpu=node.card,
        efficiency=Efficiency(),
        gpus_per_node=1,
    )
    record.figure("planned weight sync", num_bytes / planned.seconds / 1e9, "GB/s")


def _checkpoint(record: Record, actor: ActorGroup, folder: Path) -> None:
    started_s = time.monotonic()
    actor.save_checkpoint(folder)
    seconds = time.monotonic() - started_s
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    record.figure("checkpoint", seconds, "s")
    record.figure("checkpoint size", size / GIB, "GiB")
    record.figure("checkpoint rate", size / GIB / seconds, "GiB/s", key=True)
