"""The short way through decode steps does what vLLM's own scheduler does, field by field.

Both schedulers get the same requests, and in the place of a model the same random tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rlmath.vllm_plugin.cpu_scheduler import DecodeScheduler

BLOCK = 32
EOS, STOP = 5, 6


@pytest.fixture(scope="module")
def configs(model_folder: Path) -> dict[bool, VllmConfig]:
    """With and without prefix caching."""
    return {
        caching: EngineArgs(
            model=str(model_folder),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=12,
            block_size=BLOCK,
            enable_prefix_caching=caching,
            enable_chunked_prefill=False,
            max_num_batched_tokens=512,
            async_scheduling=False,
            enforce_eager=True,
            kv_cache_memory_bytes=2**20,
        ).create_engine_config()
        for caching in (False, True)
    }


class Run:
    """A scheduler and what stands for the model behind it."""

    def __init__(self, kind: type[Scheduler], config: VllmConfig, num_blocks: int) -> None:
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        init_none_hash(sha256)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None

    def add(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.scheduler.add_request(
            Request(request_id, list(prompt), params, None, block_hasher=self.hasher)
        )

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def update(self, scheduled: SchedulerOutput, tokens: dict[str, int]) -> list[Any]:
        ids = list(scheduled.num_scheduled_tokens)
        # The model's rows need not be in the scheduler's order.
        ids = sorted(ids, key=hash_free)
        drawn = np.array([[tokens[i]] for i in ids], dtype=np.int32).reshape(-1, 1)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: row for row, i in enumerate(ids)},
            sampled_token_ids=drawn.tolist(),
            logprobs=LogprobsLists(drawn, -drawn / 7, np.zeros(len(ids), dtype=np.int64)),
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        return sorted(
            (
                (
                    one.request_id,
                    one.new_token_ids,
                    str(one.finish_reason),
                    one.stop_reason,
                    None if one.new_logprobs is None else one.new_logprobs.logprobs.tolist(),
                    one.events,
                    one.kv_transfer_params,
                )
                for batch in outputs.values()
                for one in batch.outputs
            ),
        )


def hash_free(request_id: str) -> str:
    return request_id[::-1]


def params(generator: random.Random, **more: Any) -> SamplingParams:
    made = SamplingParams(
        max_tokens=generator.choice([1, 2, 20, 70, 200]),
        logprobs=0,
        seed=1,
        stop_token_ids=[STOP] if generator.random() < 0.3 else None,
        **more,
    )
    # As the engine's input processor sets it.
    made._eos_token_id = EOS if generator.random() < 0.8 else None
    return made


def state(scheduler: Scheduler) -> dict[str, Any]:
    return {
        "requests": {
            name: (
                request.status,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                list(request.all_token_ids),
                len(request.block_hashes),
                request.is_prefill_chunk,
                request.num_preemptions,
            )
            for name, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "free blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "finished": scheduler.finished_req_ids,
        "step": scheduler.current_step,
    }


def described(scheduled: SchedulerOutput) -> dict[str, Any]:
    values = {f.name: getattr(scheduled, f.name) for f in fields(scheduled)}
    values["scheduled_new_reqs"] = [repr(new) for new in scheduled.scheduled_new_reqs]
    return values


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix_caching"])
@pytest.mark.parametrize("num_blocks", [100, 14], ids=["", "short_of_memory"])
@pytest.mark.parametrize("seed", range(3))
def test_it_schedules_and_hands_on_what_vllms_own_does(
    configs: dict[bool, VllmConfig], caching: bool, num_blocks: int, seed: int
) -> None:
    generator = random.Random(seed)
    ours = Run(DecodeScheduler, configs[caching], num_blocks)
    theirs = Run(Scheduler, configs[caching], num_blocks)
    seen: Counter[str] = Counter()
    num_added = 0
    prompts = [[generator.randrange(10, 200) for _ in range(n)] for n in (3, 18, 31, 32, 40, 64)]
    for step in range(3000):
        if step >= 400 and not ours.scheduler.requests:
            break
        if (step < 400 and generator.random() < 0.05) or step == 0:
            for _ in range(generator.randrange(1, 9)):
                of = params(generator)
                prompt = generator.choice(prompts)
                for run in (ours, theirs):
                    run.add(str(num_added), prompt, of)
                num_added += 1
        if generator.random() < 0.02 and ours.scheduler.requests:
            aborted = generator.choice(sorted(ours.scheduler.requests))
            for run in (ours, theirs):
                run.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
        if generator.random() < 0.01 and caching:
            for run in (ours, theirs):
                run.scheduler.reset_prefix_cache()
        scheduled, expected = ours.schedule(), theirs.schedule()
        assert described(scheduled) == described(expected), step
        if generator.random() < 0.02 and scheduled.num_scheduled_tokens:
            # While the model is at work.
            aborted = generator.choice(sorted(scheduled.num_scheduled_tokens))
            for run in (ours, theirs):
                run.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        tokens = {i: generator.randrange(4, 200) for i in scheduled.num_scheduled_tokens}
        if not tokens:
            continue
        got, wanted = ours.update(scheduled, tokens), theirs.update(expected, tokens)
        assert got == wanted, step
        seen.update(finish for _, _, finish, *_ in got)
        assert state(ours.scheduler) == state(theirs.scheduler), step
        seen["preempted"] += any(r.num_preemptions for r in ours.scheduler.requests.values())
    assert not ours.scheduler.requests
    # All of it has happened, and most steps went the short way.
    assert seen["stop"] > 3
    assert seen["length"] > 3
    assert seen["aborted"]
    assert bool(seen["preempted"]) == (num_blocks == 14)
    assert isinstance(ours.scheduler, DecodeScheduler)
    share = ours.scheduler.num_short_steps / ours.scheduler.current_step
    assert share > (0.5 if num_blocks == 100 else 0.1)


def test_what_it_does_not_know_goes_vllms_way(configs: dict[bool, VllmConfig]) -> None:
    run = Run(DecodeScheduler, configs[False], 100)
    scheduler = run.scheduler
    assert isinstance(scheduler, DecodeScheduler)

    def steps(n: int) -> None:
        for _ in range(n):
            scheduled = run.schedule()
            run.update(scheduled, dict.fromkeys(scheduled.num_scheduled_tokens, 9))

    run.add("plain", [9] * 4, SamplingParams(max_tokens=50, logprobs=0))
    steps(5)
    assert scheduler.num_short_steps == 4
    run.add("special", [9] * 4, SamplingParams(max_tokens=50, logprobs=0, prompt_logprobs=1))
    steps(5)
    assert scheduler.num_short_steps == 4
