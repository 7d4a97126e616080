"""Cost of the engine's loop for each sequence and step, in CPU microseconds of its thread.

    python benchmarks/engine_loop.py [--sequences 256] [--tokens 512]

vLLM's scheduler with two steps in flight, as on a GPU, and rlmath's step loop around it; the place
of the model is taken by ready tokens, whose time is not counted, so what is left is what the GPU
waits for on the host, but for vLLM's model runner. Once with vLLM's own scheduler and once with
rlmath's (`rlmath/engines/patches/async_scheduler.py`). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.structured_output import StructuredOutputManager

from rlmath.engines.patches.async_scheduler import AsyncDecodeScheduler
from rlmath.engines.requests import EngineSpec, Request
from rlmath.engines.running_request import RunningRequest
from rlmath.engines.step_loop import StepLoop
from rlmath.model.tiny import make_tiny_model

BLOCK, PROMPT_TOKENS = 16, 100
EOS = 5


def make_scheduler(kind: Any, config: Any, num_blocks: int) -> Any:
    """A scheduler of this class, over a cache of one layer with blocks of the configured size."""
    config.cache_config.num_gpu_blocks = num_blocks
    block_size = config.cache_config.block_size
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )


class Core:
    """vLLM's engine core in its process, with ready tokens instead of a model."""

    def __init__(self, kind: Any, config: Any, num_blocks: int) -> None:
        self.scheduler = make_scheduler(kind, config, num_blocks)
        self.engine_core = SimpleNamespace(batch_queue=deque())
        self.aborted: list[str] = []
        self.model_s = 0.0

    def get_output(self) -> Any:
        """As ``EngineCore.step_with_batch_queue``."""
        queue = self.engine_core.batch_queue
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            queue.append(scheduled)
            if len(queue) < 2 and scheduled.total_num_scheduled_tokens:
                return EngineCoreOutputs()
        scheduled = queue.popleft()
        output = self._model(scheduled)
        outputs = self.scheduler.update_from_output(scheduled, output)
        return outputs.get(0) or EngineCoreOutputs()

    def _model(self, scheduled: Any) -> ModelRunnerOutput:
        started_s = time.thread_time()
        ids = list(scheduled.num_scheduled_tokens)
        tokens = np.full((len(ids), 1), 9, np.int32)
        log_probs = np.full((len(ids), 1), -1.0, np.float32)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: row for row, one in enumerate(ids)},
            sampled_token_ids=tokens.tolist(),
            logprobs=LogprobsLists(tokens, log_probs, np.zeros(len(ids), np.int64)),
        )
        self.model_s += time.thread_time() - started_s
        return output

    def abort_requests(self, ids: list[str]) -> None:
        assert not ids


def microseconds(kind: Any, config: Any, folder: str, sequences: int, tokens: int) -> float:
    """CPU time of the loop for each sequence and step, with prompts read and samples finished."""
    core = Core(kind, config, num_blocks=sequences * (2 + (PROMPT_TOKENS + tokens) // BLOCK))
    loop = StepLoop(spec_of(folder), 0)
    loop._engine = SimpleNamespace(engine_core=core)
    loop._tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for number in range(sequences):
        prompt = tuple(100 + (number * 31 + place) % 400 for place in range(PROMPT_TOKENS))
        # Uneven, so that in each step some sequences need a block.
        asked = Request(str(number), 0, prompt[number % BLOCK :], tokens, 1.0, 1.0, number)
        params = SamplingParams(max_tokens=tokens, logprobs=0, seed=number)
        params._eos_token_id = EOS
        made = VllmRequest(
            str(number), list(asked.prompt_token_ids), params, None, block_hasher=hasher
        )
        core.scheduler.add_request(made)
        loop._running[str(number)] = RunningRequest.of(asked, None)
    started_s = time.thread_time()
    while loop._running:
        loop._step()
    seconds = time.thread_time() - started_s - core.model_s
    return 1e6 * seconds / sequences / tokens


def spec_of(folder: str) -> EngineSpec:
    return EngineSpec(
        model_path=folder,
        dtype="float32",
        device="cpu",
        tensor_parallel=1,
        max_sequence_tokens=2048,
        max_running_sequences=1024,
        transport="shared_memory",
        log_dir=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), max_position_embeddings=4096)
        config = EngineArgs(
            model=folder,
            dtype="float32",
            max_model_len=PROMPT_TOKENS + arguments.tokens,
            max_num_seqs=arguments.sequences,
            block_size=BLOCK,
            max_num_batched_tokens=16384,
            enforce_eager=True,
            kv_cache_memory_bytes=2**20,
        ).create_engine_config()
        # As on a GPU. vLLM refuses both here, and its scheduler reads them when it is made.
        config.scheduler_config.async_scheduling = True
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        found = {
            name: round(
                min(
                    microseconds(kind, config, folder, arguments.sequences, arguments.tokens)
                    for _ in range(3)
                ),
                2,
            )
            for name, kind in {"vllm": AsyncScheduler, "rlmath": AsyncDecodeScheduler}.items()
        }
        print(json.dumps({"us_per_sequence_and_step": found, **vars(arguments)}))


if __name__ == "__main__":
    main()
