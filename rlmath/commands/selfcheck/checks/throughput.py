"""Decode throughput of an engine, with and without async scheduling, against vLLM alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.cluster.logs import end_of
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.config.schema import Config
from rlmath.engines import bare_vllm
from rlmath.engines.engine_arguments import cuda_arguments
from rlmath.engines.requests import EngineSpec, Request

# Requests and tokens of each.
WORK = {"cuda": (256, 512), "cpu": (16, 64)}
# The first round warms up; of the others the fastest counts.
ROUNDS = 3
# Of vLLM's own throughput; less means that the engine waits for something else.
LEAST_RATIO = 0.8
BARE_TIMEOUT_S = 300.0


def run(node: Node, record: Record) -> None:
    """The same requests by our engine and by ``LLM.generate``, one after the other."""
    count, tokens = WORK[node.device]
    wanted = parts.requests(node, count, prompts=8, max_tokens=tokens)
    record.figure("requests", count)
    record.figure("tokens of each", tokens)
    common = [
        f"rollout.max_response_tokens={tokens}",
        f"rollout.max_running_sequences={count}",
        "rollout.enforce_eager=false",
    ]
    if node.on_cuda:
        ways = {
            "async scheduling": [*common, "rollout.async_scheduling=true"],
            "no async scheduling": [*common, "rollout.async_scheduling=false"],
        }
    else:
        ways = {"engine": common}
        record.not_applicable("async scheduling", "vLLM never schedules ahead on a CPU")
    rates: dict[str, float] = {}
    for name, overrides in ways.items():
        config = parts.settings(node, name.replace(" ", "_"), min(node.gpus, 1), overrides)
        rates[name], spec = _ours(record, config, name, wanted)
        record.figure(f"{name}", rates[name], "tokens/s", key=True)
    with record.phase("vLLM alone"):
        bare = _bare(node, spec, wanted)
    for kind, found in bare.items():
        record.figure(f"vLLM alone, {kind}", max(found[1:]), "tokens/s")
    for name, rate in rates.items():
        ratio = rate / max(bare["same sampling"][1:])
        limit = f">= {LEAST_RATIO:g}" if node.on_cuda else ""
        record.figure(f"{name} / vLLM alone", ratio, limit=limit, key=True)
        record.require(
            ratio >= LEAST_RATIO or not node.on_cuda,
            f"{name}: {rate:,.0f} tokens/s are {ratio:.2f} of what vLLM gives alone, less than "
            f"{LEAST_RATIO:g}",
        )
    if len(rates) == 2:
        first, second = rates.values()
        record.figure("with / without async scheduling", first / second, key=True)


def _ours(
    record: Record, config: Config, name: str, wanted: Sequence[Request]
) -> tuple[float, EngineSpec]:
    """Tokens per second of the fastest round but the first, and how the engine was set up."""
    best, expected = 0.0, sum(request.max_tokens for request in wanted)
    with parts.started_engines(config, record, name) as pool:
        for number in range(ROUNDS):
            started_s = time.perf_counter()
            tokens = sum(len(one.token_ids) for one in pool.generate(wanted))
            seconds = time.perf_counter() - started_s
            record.require(
                tokens == expected, f"{name}: {tokens} of {expected} tokens were generated"
            )
            if number:
                best = max(best, tokens / seconds)
        return best, pool.spec


def _bare(node: Node, spec: EngineSpec, wanted: Sequence[Request]) -> dict[str, list[float]]:
    """Tokens per second of each round of vLLM alone, set up as the engine was."""
    folder = Path(node.folder)
    asked, answer, log = (folder / name for name in ("asked.json", "answer.json", "bare.log"))
    engine: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "max_model_len": spec.max_sequence_tokens,
        "max_num_seqs": spec.max_running_sequences,
        "enable_prefix_caching": spec.prefix_caching,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    environment = {**os.environ, **spec.environment()}
    if node.on_cuda:
        # As vLLM is used alone: its engine in a process beside the one that asks.
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        engine["gpu_memory_utilization"] = spec.gpu_memory_utilization
        engine["max_num_batched_tokens"] = cuda_arguments(spec)["max_num_batched_tokens"]
    else:
        engine |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(spec.cpu_kv_cache_gib * 2**30),
        }
    content = {
        "engine": engine,
        "prompts": [list(request.prompt_token_ids) for request in wanted],
        "seeds": [request.seed for request in wanted],
        "max_tokens": wanted[0].max_tokens,
        "rounds": ROUNDS,
    }
    asked.write_text(json.dumps(content), encoding="utf-8")
    with open(log, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", bare_vllm.__name__, str(asked), str(answer)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=BARE_TIMEOUT_S,
        )
    if done.returncode:
        raise RuntimeError(f"vLLM alone ended with exit code {done.returncode}" + end_of(str(log)))
    rates: dict[str, list[float]] = json.loads(answer.read_text(encoding="utf-8"))
    return rates
