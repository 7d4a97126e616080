"""Requests and answers between pool and engines, and the settings of engines."""

from __future__ import annotations

import array
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import RolloutConfig
from rlmath.engines.patches.cpu_routes import ROUTES_VARIABLE
from rlmath.engines.patches.engine_precision import BATCH_INVARIANT_VARIABLE, ROUTER_VARIABLE
from rlmath.engines.patches.register import ENGINE_VARIABLE, adapter_backend
from rlmath.engines.profiling import EngineProfile
from rlmath.engines.routes import RouteSpec
from rlmath.engines.transport import transport_named
from rlmath.errors import ComponentError, UserError
from rlmath.model.lora import Lora
from rlmath.model.precision import Precision
from rlmath.types import Problem, Sample


class EngineError(ComponentError):
    """An engine failed or stalled. The message names it and shows the end of its log."""


class EngineStartError(UserError):
    """An engine that could not start. The message gives the reason and the end of its log."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    problem_id: str  # The problem that it answers.
    index: int  # Its place in the problem's group, from 0.
    prompt_token_ids: tuple[int, ...]  # Tokens to continue; never tokenized again.
    max_tokens: int  # Longest response, in tokens, including the begun part.
    temperature: float  # Divides the logits; 0 takes the likeliest token.
    # Probability mass of the likeliest tokens to sample from. Only samples at 1 have
    # log-probabilities that the actor can reproduce, so others are never trained on.
    top_p: float
    seed: int  # Seed of its random stream.
    # Continue after an end-of-sequence token, up to max_tokens: for measuring at a fixed length.
    ignore_eos: bool = False
    begun: Sample | None = None  # Sample of earlier steps that it continues, if any.
    # Most tokens to add now; a sample that would continue is cut there. None: up to max_tokens.
    budget_tokens: int | None = None
    # The engine that made the begun part and may still have its keys and values; another one
    # computes them again. None: any engine.
    stays_on: int | None = None
    # Nothing is sampled: the answer is begun with the engine's own log-probs of its tokens, at
    # temperature 1. vLLM gives those of a prompt only, and samples a token after it, so max_tokens
    # is one more than begun has.
    scores: bool = False
    # Whether its sample carries an MoE's routes, if the engine returns them: only for training, or
    # comparison with the actor's log-probs.
    wants_routes: bool = False
    # Texts that end the model's turn, each after an opening: ("```python", "\n```") ends it at the
    # first closing fence of a block that it opened in this turn.
    stop: tuple[tuple[str, str], ...] = ()
    # The problem, where an environment answers the model's turns; None: there is one turn. Engines
    # do not get it.
    problem: Problem | None = None

    @property
    def begun_tokens(self) -> int:
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def begun_routes(self) -> int:
        """Number of tokens, from the prompt's first, whose routes the begun part has."""
        routes = None if self.begun is None else self.begun.routes
        return 0 if routes is None else len(routes)

    @property
    def new_tokens(self) -> int:
        """Most tokens to add."""
        rest = self.max_tokens - self.begun_tokens
        return rest if self.budget_tokens is None else min(rest, self.budget_tokens)

    @property
    def key(self) -> tuple[str, int]:
        """The identity of the request within a batch."""
        return self.problem_id, self.index


def prompt_digest(token_ids: Sequence[int]) -> int:
    """CRC-32 of a prompt's tokens as int32."""
    return zlib.crc32(array.array("i", token_ids))


def cut_sample(request: Request) -> Sample:
    """The sample of a request before an engine has it."""
    if request.begun is not None:
        return request.begun
    return Sample(
        problem_id=request.problem_id,
        index=request.index,
        token_ids=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        text="",
        finish_reason="cut",
        spans=((0, 0),),
        seed=request.seed,
        engine=0,
    )


@dataclass(frozen=True)
class Progress:
    """An engine's answer to the pool."""

    # Samples finished since the last answer, in the order in which they finished.
    samples: tuple[Sample, ...]
    unfinished: int  # Number of its unfinished requests.
    tokens_generated: int  # Response tokens since its start.
    # Prompt and response tokens of its unfinished requests, whose keys and values a decode step
    # reads.
    tokens_held: int
    quiet_s: float  # Seconds since its last token; 0 when it has no work.
    # Tokens of continued responses and their prompts, since the last answer, whose keys and values
    # it still had.
    tokens_reused: int = 0


# Tokens of a block of vLLM's KV cache on CPU; prefixes are kept in whole blocks.
CPU_BLOCK_TOKENS = 128

# A weight update packs gigabytes into memory that the old weights have just returned. The C library
# has to keep it meanwhile, as new pages cost more than the copy: no separate mmap for large blocks,
# one heap for all threads, up to 256 MiB free at its end; in pages of 2 MiB where the kernel leaves
# that to the program.
KEEP_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:"
    f"glibc.malloc.trim_threshold={256 * 2**20}"
)


# Variables that allow vLLM to use FlashInfer.
FLASHINFER_VARIABLES = (
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
)


@dataclass(frozen=True)
class EngineSpec:
    model_path: str  # Hugging Face folder; its weights are version 0 if they are read.
    dtype: Literal["float32", "bfloat16"]  # Type of weights and activations.
    device: Literal["cpu", "cuda"]
    tensor_parallel: int  # Ranks that share the engine's matrices.
    max_sequence_tokens: int  # Longest prompt and response together, in tokens.
    max_running_sequences: int  # Sequences that run at once.
    transport: str  # Name of the weight transfer backend.
    log_dir: str  # Folder for each engine's output.
    # Keep prompts' KV blocks for reuse within one weights version.
    prefix_caching: bool = RolloutConfig.prefix_caching
    # A response that is continued may use the KV blocks that older weights computed for it; no
    # other sees them.
    keeps_kv: bool = False
    enforce_eager: bool = RolloutConfig.enforce_eager  # Skip CUDA graphs; a CPU engine has none.
    # Share of a GPU's memory. CUDA only.
    gpu_memory_utilization: float = RolloutConfig.gpu_memory_utilization
    cpu_kv_cache_gib: float = RolloutConfig.cpu_kv_cache_gib  # Size of the KV cache. CPU only.
    # Return GPU memory between rollouts (engines that share a GPU with the actor). CUDA only.
    sleeps: bool = False
    # Most tokens of one step. CUDA only.
    max_batched_tokens: int = RolloutConfig.max_batched_tokens
    async_scheduling: bool = False  # Schedule a step while the one before runs. CUDA only.
    short_steps: bool = True  # Schedule decode-only steps in rlmath's short path.
    # The engine's GPUs, one for each tensor-parallel rank, as CUDA_VISIBLE_DEVICES names them on
    # the node; none: those that the process sees, from the first. CUDA only.
    device_ids: tuple[str, ...] = ()
    # Size of each rank's KV cache; None: what memory profiling leaves within
    # gpu_memory_utilization. CUDA only.
    kv_cache_bytes: int | None = None
    precision: Precision = field(default_factory=Precision)  # Precision that the actor also has.
    # Form in which vLLM keeps matrices after reading or receiving them.
    quantization: Quantization = RolloutConfig.quantization
    # Type of keys and values in the cache.
    kv_cache_dtype: KvCacheDtype = RolloutConfig.kv_cache_dtype
    # Adapters that weight syncs bring, computed beside the model's weights; None: weight syncs
    # bring all weights.
    adapters: Lora | None = None
    # Use FlashInfer's kernels instead of vLLM's. CUDA only.
    flashinfer: bool = RolloutConfig.flashinfer
    role: str = "engine"  # Name of the engine in messages and files.
    # Whether it reads the model folder's weights; else it starts with random ones, and a weight
    # sync has to bring all of them before the first request.
    reads_weights: bool = True
    # Routes of an MoE to return with samples that ask for them; None: none.
    routes: RouteSpec | None = None
    # Further arguments of vLLM's engine, from rollout.engine_arguments.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    profile: EngineProfile | None = None  # Profiler settings; None: no profile.

    @property
    def transfer_backend(self) -> str:
        """vLLM's name for the workers' side of the transport."""
        if self.adapters is not None:
            return adapter_backend(transport_named(self.transport).adapters or self.transport)
        return transport_named(self.transport).backend

    def log_path(self, engine: int) -> str:
        return f"{self.log_dir}/{self.role}_{engine}.log"

    def environment(self) -> dict[str, str]:
        """Variables of the engine's process, to be set before any import there.

        On CPU: one thread per rank, because threads that spin beside another busy process take ten
        times longer than one alone; no compiler, whose first call costs more than it gains.
        """
        variables = {
            ENGINE_VARIABLE: "1",
            # With one rank the engine runs in the actor's own process: less to start, to lose
            # and to clean up. Its workers, if it has more, are processes either way.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            ROUTER_VARIABLE: self.precision.router_dtype,
            BATCH_INVARIANT_VARIABLE: str(int(self.precision.batch_invariant)),
            ROUTES_VARIABLE: str(int(self.routes is not None)),
        }
        if self.device == "cpu":
            variables |= {
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_WORKER_MULTIPROC_METHOD": "fork",
                "TORCH_COMPILE_DISABLE": "1",
                "GLIBC_TUNABLES": KEEP_MEMORY,
                # Workers that have been told to end sleep through more than this; then SIGTERM.
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            }
        else:
            variables |= {
                # An engine of several ranks asks Ray for no GPU, as Ray can give an actor only
                # GPUs of one bundle. It names its GPUs, and must see them.
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                # A KV cache size remembered from another run would replace the measured one.
                "VLLM_ENABLE_STARTUP_PLAN": "0",
                # vLLM's own choice depends on what is on PATH.
                **dict.fromkeys(FLASHINFER_VARIABLES, str(int(self.flashinfer))),
            }
        return variables
