"""An engine's set-up for vLLM: arguments, and folders of compiled code."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlmath.config.rollout import Quantization
from rlmath.engines.patches.engine_precision import engine_arguments
from rlmath.engines.profiling import profiler_arguments
from rlmath.engines.requests import EngineSpec
from rlmath.model.lora import Lora, rank_in_vllm
from rlmath.utils.node_cache import LOCK, node_cache, seed

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

# Tokens of one step on CPU, at least.
CPU_BATCHED_TOKENS = 4096
# Switches off vLLM's check of a GPU's free memory when an engine starts.
LEAST_UTILIZATION = 0.01
# vLLM's name for rollout.quantization=fp8; its rule is rlmath/model/fp8.py.
FP8 = "fp8_per_channel"
# Schedulers of CPU engines and of those that schedule ahead, by the names that vLLM resolves.
CPU_SCHEDULER = "rlmath.engines.patches.cpu_scheduler.DecodeScheduler"
ASYNC_SCHEDULER = "rlmath.engines.patches.async_scheduler.AsyncDecodeScheduler"


def vllm_arguments(spec: EngineSpec) -> EngineArgs:
    """Arguments of vLLM's engine. Imports vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=spec.model_path,
        load_format="auto" if spec.reads_weights else "dummy",
        dtype=spec.dtype,
        quantization=None if spec.quantization is Quantization.none else FP8,
        kv_cache_dtype=spec.kv_cache_dtype.value,
        # States of linear attention are in float32 in the actor.
        mamba_ssm_cache_dtype="float32",
        tensor_parallel_size=spec.tensor_parallel,
        # vLLM's own worker processes: Ray's would need bundles that Ray places.
        distributed_executor_backend="uni" if spec.tensor_parallel == 1 else "mp",
        max_model_len=spec.max_sequence_tokens,
        max_num_seqs=spec.max_running_sequences,
        enable_prefix_caching=spec.prefix_caching,
        enable_sleep_mode=spec.sleeps,
        weight_transfer_config={"backend": spec.transfer_backend},  # type: ignore[arg-type]
        disable_log_stats=True,
        seed=0,
        **engine_arguments(spec.precision),
        **adapter_arguments(spec.adapters),
        **profiler_arguments(spec.profile),
        **(_cpu_arguments if spec.device == "cpu" else cuda_arguments)(spec) | dict(spec.arguments),
    )


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    from rlmath.engines.patches.cpu_norms import PRIORITY

    return {
        # vLLM rewinds the random stream of a prompt that it read only in part, which a CPU
        # generator cannot do: on CPU each prompt is read whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, spec.max_sequence_tokens),
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(spec.cpu_kv_cache_gib * 2**30),
        "async_scheduling": False,
        # Routes come from it, too: vLLM's own asks a CPU's runner for none.
        "scheduler_cls": CPU_SCHEDULER if spec.short_steps or spec.routes else None,
        "ir_op_priority": PRIORITY,
    }


def cuda_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of vLLM on GPUs only.

    A step never has more tokens than all running sequences at their longest. vLLM warms up with the
    number that it is given, and if this does not fit its block tables it writes beyond them: the
    first request then fails with an illegal memory access (vLLM 0.32.0, H100).
    """
    most_tokens = spec.max_running_sequences * spec.max_sequence_tokens
    return {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": min(spec.max_batched_tokens, most_tokens),
        "enforce_eager": spec.enforce_eager,
        # vLLM does not start where less is free. When an engine starts again, ranks may hold more
        # than at first, and its cache has its size.
        "gpu_memory_utilization": (
            spec.gpu_memory_utilization if spec.kv_cache_bytes is None else LEAST_UTILIZATION
        ),
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "async_scheduling": spec.async_scheduling,
        "scheduler_cls": ASYNC_SCHEDULER if spec.short_steps and spec.async_scheduling else None,
        # Strings name GPUs of the node. vLLM takes numbers as positions in CUDA_VISIBLE_DEVICES,
        # which Ray sets for engines of one rank and leaves alone for wider ones.
        "device_ids": list(spec.device_ids) or None,
        "enable_return_routed_experts": spec.routes is not None,
    }


def adapter_arguments(adapters: Lora | None) -> dict[str, Any]:
    """Arguments of vLLM where it computes adapters: one adapter, of these matrices alone.

    vLLM's default is every linear layer, including an MoE's experts.
    """
    if adapters is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": rank_in_vllm(adapters.rank),
        "lora_target_modules": list(adapters.targets),
    }


def cache_folder(spec: EngineSpec, engine: int) -> tuple[Path, IO[str] | None]:
    """Take a folder for compiled code that no other engine of this node uses, and name it in the
    environment.

    vLLM's table of compiled graphs (``vllm_compile_cache.py``) is rewritten in place, so an engine
    that reads it while another one of the node writes it finds half a file. Folders are numbered
    and outlive their engines: the next run finds what this one compiled, and an empty folder gets
    what an engine of another node has compiled (``cache_archive``). FlashInfer's builds stay
    shared: they are made under a file lock, and take minutes each.

    Args:
        engine: Its number in the pool, used if it has no named GPU.

    Returns:
        The folder; and the locked file that keeps it while it is open, here and in child processes,
        ``None``: there is no folder that can be locked, and a temporary one is used.
    """
    gpu = spec.device_ids[0] if spec.device_ids else ""
    for number in itertools.count(int(gpu) if gpu.isdecimal() else engine):
        lock: IO[str] | None = None
        try:
            root = Path(os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or node_cache()))
            folder = root / f"rlmath_{spec.role}_{number}"
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seed(folder, cache_archive(spec))
        except BlockingIOError:
            continue
        except OSError:  # Read-only, another user's, or a file system without locks.
            folder, lock = Path(tempfile.mkdtemp(prefix=f"rlmath_{spec.role}_")), None
        break
    os.environ["VLLM_CACHE_ROOT"] = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    return folder, lock


def cache_archive(spec: EngineSpec) -> Path:
    """The archive in the run's folder of one engine's compiled code, for engines of other nodes."""
    return Path(spec.log_dir).parent / f"compiled_{spec.role}.tar"
