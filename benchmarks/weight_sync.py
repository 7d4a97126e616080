"""Seconds and GB/s of weights from Megatron ranks to vLLM engines, beside memcpy of the same bytes.

Four Megatron ranks (tensor 2 x pipeline 2) send a random model of half a billion parameters to one
engine and to two, through the transport that a run would take, until the engines could sample with
it. Prints one JSON line. ``share_of_memcpy`` compares with one thread that copies what is delivered
(the model once for each engine) between memory that is there already; on CPU it should be at least
a third. Then full weight syncs to both engines alternate with and without the checks of a run
(fingerprints of every tensor, constants, prefix cache): ``checks``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rlmath.model.parallel import Layout

if TYPE_CHECKING:
    import torch

    from rlmath.actor.group import ActorGroup
    from rlmath.model.spec import ModelSpec
    from rlmath.rollout.pool import RolloutPool

LAYOUT = Layout(2, 2, 1)
# 0.54 billion parameters; small enough to be held by ranks and two engines in 16 GiB.
SIZES = {
    "num_layers": 22,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_heads": 16,
    "num_kv_heads": 8,
}
MAX_TOKENS = 128
# Sends at the beginning that are not counted: the first ones take memory that later ones find.
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="counted sends")
    parser.add_argument("--bucket-size-mib", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, to try the script")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least one send has to be counted")
    # Megatron and Ray take seconds to import, which --help and a mistake do not wait for.
    from rlmath.cluster.session import ray_session
    from rlmath.config.schema import ClusterConfig
    from rlmath.quickstart import make_tiny_model

    with tempfile.TemporaryDirectory() as folder, ray_session(ClusterConfig(object_store_mib=100)):
        sizes = {} if arguments.tiny else SIZES
        model = make_tiny_model(Path(folder) / "model", **sizes)
        print(json.dumps(measure(model, Path(folder) / "logs", arguments)))


def measure(model: Path, logs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start ranks and engines, and send again and again."""
    import torch

    from rlmath.actor.group import ActorGroup
    from rlmath.actor.model import ModelSettings
    from rlmath.actor.policy import ActorSettings
    from rlmath.engines.requests import EngineSpec
    from rlmath.engines.transports import TransportPlan
    from rlmath.rollout.pool import RolloutPool

    dtype: torch.dtype = getattr(torch, arguments.dtype)
    settings = ActorSettings(
        model_path=str(model),
        model=ModelSettings(dtype),
        optimizer=None,
        temperature=1.0,
        max_tokens_per_microbatch=MAX_TOKENS,
        max_sequence_length=MAX_TOKENS,
    )
    spec = EngineSpec(
        model_path=str(model),
        dtype=arguments.dtype,
        device="cpu",
        tensor_parallel=1,
        max_sequence_tokens=MAX_TOKENS,
        max_running_sequences=2,
        transport="shared_memory",
        log_dir=str(logs),
        cpu_kv_cache_gib=0.125,
    )
    actor = ActorGroup(settings, LAYOUT, device="cpu", seed=0, num_threads=1, log_dir=str(logs))
    pool = RolloutPool(spec, num_engines=2, stall_timeout_s=600)
    with pool, actor:
        result: dict[str, Any] = {
            "benchmark": "weight_sync",
            "dtype": arguments.dtype,
            "bucket_size_mib": arguments.bucket_size_mib,
            "ranks": "TP2xPP2",
            "cores": len(os.sched_getaffinity(0)),
        }
        version = 0
        for engines in (1, 2):
            plan = TransportPlan(
                "shared_memory",
                tuple(pool.engines[:engines]),
                spec.tensor_parallel,
                bucket_size_mib=arguments.bucket_size_mib,
                run_id=f"weight-sync-{os.getpid()}",
            )
            actor.connect_engines(plan)
            seconds = []
            for _ in range(WARM_UP + arguments.rounds):
                version += 1
                begin = time.perf_counter()
                actor.send_weights(version)
                seconds.append(time.perf_counter() - begin)
            if engines == 1:
                num_bytes = _model_bytes(model, dtype)
                memcpy_s = _memcpy_s(num_bytes, arguments.rounds)
                result |= {"model_gb": round(num_bytes / 1e9, 4)}
                result |= {"memcpy_s": round(memcpy_s, 4)}
                result |= {"memcpy_gb_per_s": round(num_bytes / memcpy_s / 1e9, 3)}
            median = statistics.median(seconds[WARM_UP:])
            delivered = engines * num_bytes
            result[f"{engines}_engine{'s' * (engines > 1)}"] = {
                "seconds": round(median, 4),
                "seconds_range": [round(f(seconds[WARM_UP:]), 4) for f in (min, max)],
                "delivered_gb_per_s": round(delivered / median / 1e9, 3),
                "share_of_memcpy": round(engines * memcpy_s / median, 3),
            }
        result["checks"] = _checks(actor, pool, model, version, arguments.rounds)
    return result


def _checks(
    actor: ActorGroup, pool: RolloutPool, model: Path, version: int, rounds: int
) -> dict[str, Any]:
    """Weight syncs to all engines, every second one with the checks of a run.

    Args:
        version: The last that was sent.
        rounds: Rounds of each kind.
    """
    from rlmath.model.spec import read_model_spec
    from rlmath.rollout.weight_sync import MAX_SHARE_OF_TIME, compare_weights, sync_weights
    from rlmath.training.checks.engine_constants import check_constants
    from rlmath.training.checks.prefix_cache import check_prefix_cache

    spec = read_model_spec(model)
    plain: list[float] = []
    checked: list[float] = []
    checks_cpu: list[float] = []
    syncs_cpu: list[float] = []
    tensors = 0
    # The first pair is not counted: fingerprints allocate memory that later ones reuse.
    for _ in range(1 + rounds):
        for seconds in (plain, checked):
            version += 1
            cpu_s, begin = _cpu_s(), time.perf_counter()
            sync_weights(actor, pool, version)
            synced_cpu_s = _cpu_s()
            if seconds is checked:
                tensors = compare_weights(actor, pool)
                check_constants(pool, spec)
                check_prefix_cache(pool)
                checks_cpu.append(_cpu_s() - synced_cpu_s)
            seconds.append(time.perf_counter() - begin)
            syncs_cpu.append(synced_cpu_s - cpu_s)
    without, with_checks = (statistics.median(one[1:]) for one in (plain, checked))
    cost_s = with_checks - without
    return {
        "verified_tensors": tensors,
        "without_s": round(without, 4),
        "with_s": round(with_checks, 4),
        "sync_cpu_s": round(statistics.median(syncs_cpu[2:]), 2),
        "checks_cpu_s": round(statistics.median(checks_cpu[1:]), 2),
        # The step from which all weights are compared at every sync.
        "all_from_step_s": round(cost_s / MAX_SHARE_OF_TIME, 1),
        "slices": _slices(actor, pool, spec, 10 * rounds),
    }


def _slices(actor: ActorGroup, pool: RolloutPool, spec: ModelSpec, count: int) -> dict[str, Any]:
    """Comparisons of one unit, of a hundredth of the weights and of a thousandth."""
    from rlmath.rollout.weight_sync import MAX_SHARE_OF_TIME, compare_weights
    from rlmath.weights.pieces import expert_tensors, hf_shapes
    from rlmath.weights.slices import Rotation

    whole = frozenset(expert_tensors(spec))
    rotation = Rotation(hf_shapes(spec), packed=True, whole=whole)
    found: dict[str, Any] = {}
    for name, share in (("unit", 0.0), ("0.001", 1e-3), ("0.01", 1e-2)):
        seconds, works = [], []
        for _ in range(count):
            part, work = rotation.pop(share * rotation.work)
            begin = time.perf_counter()
            compare_weights(actor, pool, part=part)
            seconds.append(time.perf_counter() - begin)
            works.append(work / rotation.work)
        mean_s = statistics.mean(seconds)
        found[name] = {
            "median_s": round(statistics.median(seconds), 4),
            "mean_s": round(mean_s, 4),
            "range_s": [round(f(seconds), 4) for f in (min, max)],
            "share_of_weights": round(statistics.mean(works), 6),
            "round_s": round(mean_s / statistics.mean(works), 1),
            "every_sync_from_step_s": round(mean_s / MAX_SHARE_OF_TIME, 1),
        }
    return found


def _cpu_s() -> float:
    """Memory of this process and all that it has started, ranks and engines among them."""
    total = 0.0
    for process in (this := psutil.Process(), *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _model_bytes(model: Path, dtype: torch.dtype) -> int:
    import torch

    from rlmath.model.spec import read_model_spec
    from rlmath.weights.pieces import hf_shapes

    shapes = hf_shapes(read_model_spec(model)).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize


def _memcpy_s(num_bytes: int, rounds: int) -> float:
    """Median seconds of one thread's memcpy of ``num_bytes``, with all pages mapped before."""
    import torch

    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
