"""The short way through decode steps does what vLLM's own schedulers do, field by field.

Both schedulers get the same requests, and in the place of a model the same random tokens.
"""

import os
import random
from collections import Counter, deque
from dataclasses import fields

import numpy as np
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.engine_loop import make_scheduler
from rlmath.engines.patches.async_scheduler import AsyncDecodeScheduler
from rlmath.engines.patches.cpu_scheduler import DecodeScheduler

BLOCK = 32
EOS, STOP = 5, 6


def config_of(model_folder, caching):
    return EngineArgs(
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


@pytest.fixture(scope="module")
def configs(model_folder):
    """With and without prefix caching."""
    return {caching: config_of(model_folder, caching) for caching in (False, True)}


@pytest.fixture(scope="module")
def ahead_configs(model_folder):
    """With asynchronous scheduling, which vLLM turns off on CPU."""
    found = {caching: config_of(model_folder, caching) for caching in (False, True)}
    for config in found.values():
        config.scheduler_config.async_scheduling = True
    return found


@pytest.fixture
def one_round(monkeypatch):
    monkeypatch.setattr(DecodeScheduler, "max_rounds", 1)


class Run:
    """A scheduler and what stands for the model behind it."""

    def __init__(self, kind, config, num_blocks):
        self.scheduler = make_scheduler(kind, config, num_blocks)
        init_none_hash(sha256)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None

    def add(self, request_id, prompt, params):
        self.scheduler.add_request(
            Request(request_id, list(prompt), params, None, block_hasher=self.hasher)
        )

    def schedule(self):
        return self.scheduler.schedule()

    def update(self, scheduled, tokens):
        ids = list(scheduled.num_scheduled_tokens)
        # The model's rows need not be in the scheduler's order.
        ids = sorted(ids, key=hash_free)
        drawn = np.array([tokens[i] for i in ids], dtype=np.int32)
        flat = drawn.reshape(-1, 1)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: row for row, i in enumerate(ids)},
            sampled_token_ids=drawn.tolist(),
            logprobs=LogprobsLists(
                flat,
                (-flat / 7).astype(np.float32),
                np.zeros(len(flat), dtype=np.int64),
                list(range(0, len(flat) + 1, drawn.shape[1])),
            ),
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        found = []
        for batch in outputs.values():
            for one in batch.outputs:
                log_probs = None if one.new_logprobs is None else one.new_logprobs.logprobs.tolist()
                reason = str(one.finish_reason)
                more = one.events, one.kv_transfer_params
                taken = one.request_id, one.new_token_ids, reason, one.stop_reason, log_probs
                found.append((*taken, *more))
            decoded = getattr(batch, "decoded", None)
            for number, request_id in enumerate(decoded.ids if decoded else ()):
                of_request = decoded.tokens[number].tolist(), decoded.log_probs[number]
                log_probs = of_request[1][:, None].tolist()
                found.append((request_id, of_request[0], "None", None, log_probs, None, None))
        return sorted(found)


def hash_free(request_id):
    return request_id[::-1]


def params(generator, **more):
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


def state(scheduler):
    return {
        "requests": {
            name: (
                request.status,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_output_placeholders,
                list(request.all_token_ids),
                len(request.block_hashes),
                request.is_prefill_chunk,
                request.num_preemptions,
            )
            for name, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "cached blocks": len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block),
        "free blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "finished": scheduler.finished_req_ids,
        "step": scheduler.current_step,
    }


def describe(scheduled):
    values = {f.name: getattr(scheduled, f.name) for f in fields(SchedulerOutput)}
    values["scheduled_new_reqs"] = [repr(new) for new in scheduled.scheduled_new_reqs]
    return values


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix_caching"])
@pytest.mark.parametrize("num_blocks", [100, 14], ids=["", "short_of_memory"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("one_round")
def test_decode_scheduler_equals_vllms(configs, caching, num_blocks, seed):
    kinds = DecodeScheduler, Scheduler
    share = compare(kinds, configs[caching], num_blocks, random.Random(seed), in_flight=1)
    assert share > (0.5 if num_blocks == 100 else 0.1)


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix_caching"])
@pytest.mark.parametrize("num_blocks", [100, 14], ids=["", "short_of_memory"])
@pytest.mark.parametrize(("seed", "second_runner"), [(0, "0"), (1, "1"), (2, "1")])
def test_decode_scheduler_with_steps_ahead_equals_vllms(
    monkeypatch, ahead_configs, caching, num_blocks, seed, second_runner
):
    # vLLM refuses it for configurations without Triton; the scheduler reads it when it is made.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    kinds = AsyncDecodeScheduler, AsyncScheduler
    share = compare(kinds, ahead_configs[caching], num_blocks, random.Random(seed), in_flight=2)
    assert share > (0.8 if num_blocks == 100 else 0.03)


def compare(kinds, config, num_blocks, generator, in_flight):
    """Random requests to our scheduler and to vLLM's, with this many steps scheduled before the
    first is read. Returns the share of short steps."""
    ours, theirs = runs = [Run(kind, config, num_blocks) for kind in kinds]
    if in_flight > 1:
        second = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        assert ours.scheduler.use_v2_model_runner == second
    queue, seen, num_added = deque(), Counter(), 0
    prompts = [[generator.randrange(10, 200) for _ in range(n)] for n in (3, 18, 31, 32, 40, 64)]

    def abort(ids):
        aborted = generator.choice(sorted(ids))
        for run in runs:
            run.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        seen["aborted"] += 1

    for step in range(3000):
        if step >= 400 and not ours.scheduler.requests and not queue:
            break
        if (step < 400 and generator.random() < 0.05) or step == 0:
            for _ in range(generator.randrange(1, 9)):
                of, prompt = params(generator), generator.choice(prompts)
                for run in runs:
                    run.add(str(num_added), prompt, of)
                num_added += 1
        if generator.random() < 0.02 and ours.scheduler.requests:
            abort(ours.scheduler.requests)
        if generator.random() < 0.01 and config.cache_config.enable_prefix_caching:
            for run in runs:
                run.scheduler.reset_prefix_cache()
        scheduled, expected = ours.schedule(), theirs.schedule()
        assert describe(scheduled) == describe(expected), step
        queue.append((scheduled, expected))
        # While the model is at work.
        if generator.random() < 0.02 and scheduled.num_scheduled_tokens:
            abort(scheduled.num_scheduled_tokens)
        while len(queue) >= in_flight or (queue and not queue[-1][0].num_scheduled_tokens):
            scheduled, expected = queue.popleft()
            tokens = {i: [generator.randrange(4, 200)] for i in scheduled.num_scheduled_tokens}
            if tokens:
                got, wanted = ours.update(scheduled, tokens), theirs.update(expected, tokens)
                assert got == wanted, step
                seen.update(finish for _, _, finish, *_ in got)
                assert state(ours.scheduler) == state(theirs.scheduler), step
        seen["preempted"] += any(r.num_preemptions for r in ours.scheduler.requests.values())
    assert not ours.scheduler.requests
    # All of it has happened.
    assert min(seen["stop"], seen["length"]) > 3
    assert seen["aborted"]
    assert bool(seen["preempted"]) == (num_blocks == 14)
    return ours.scheduler.num_short_steps / ours.scheduler.current_step


def in_the_end(got):
    """Tokens, log-probs and finish reason of each request, however they were returned."""
    found = {}
    for request_id, tokens, finish, stop, log_probs, *_ in got:
        one = found.setdefault(request_id, [[], [], [], []])
        one[0] += tokens
        one[1] += log_probs
        one[2:] = [finish, stop]
    return found


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix_caching"])
@pytest.mark.parametrize("num_blocks", [100, 14], ids=["", "short_of_memory"])
def test_rounds_give_each_request_what_single_steps_give(configs, caching, num_blocks):
    generator = random.Random(5)
    ours = Run(DecodeScheduler, configs[caching], num_blocks)
    theirs = Run(Scheduler, configs[caching], num_blocks)
    prompts = [[generator.randrange(10, 200) for _ in range(n)] for n in (3, 18, 31, 32, 40, 64)]
    made = [(generator.choice(prompts), params(generator)) for _ in range(40)]
    # A request's tokens depend on nothing but how many it has.
    drawn = {str(i): [generator.randrange(4, 200) for _ in range(220)] for i in range(len(made))}

    def run_to_the_end(run):
        for index, (prompt, of) in enumerate(made):
            run.add(str(index), prompt, of)
        got, seen = [], Counter[int]()
        while run.scheduler.requests:
            scheduled = run.schedule()
            rounds = getattr(scheduled, "num_rounds", 1)
            seen[rounds] += 1
            tokens = {}
            for request_id in scheduled.num_scheduled_tokens:
                request = run.scheduler.requests[request_id]
                start = request.num_output_tokens
                tokens[request_id] = drawn[request_id][start : start + rounds]
                if isinstance(run.scheduler, DecodeScheduler) and rounds > 1:
                    last = request.num_computed_tokens - 1
                    blocks = run.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
                    assert last < BLOCK * len(blocks)
                    assert last < 256
            if tokens:
                got += run.update(scheduled, tokens)
        free = run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == num_blocks - 1
        return in_the_end(got), seen

    (got, rounds), (wanted, _) = run_to_the_end(ours), run_to_the_end(theirs)
    assert got == wanted
    assert {one[2] for one in got.values()} == {"stop", "length"}
    assert rounds[8]
    assert set(rounds) >= {1, 2, 8}


def test_a_worker_without_rounds_is_an_error(configs):
    run = Run(DecodeScheduler, configs[False], 100)
    run.add("one", [9] * 4, SamplingParams(max_tokens=50, logprobs=0))
    run.update(run.schedule(), {"one": [9]})
    scheduled = run.schedule()
    with pytest.raises(RuntimeError, match=r"8 tokens of each sequence.*sampled 1"):
        run.update(scheduled, {"one": [9]})


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3},
        {"logit_bias": {9: 1.0}},
        {"allowed_token_ids": [9]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_logits_processors_use_vllms_scheduler(configs, more):
    run = Run(DecodeScheduler, configs[False], 100)
    run.add("one", [9] * 4, SamplingParams(max_tokens=50, logprobs=0, **more))
    run.update(run.schedule(), {"one": [9]})
    assert type(run.schedule()) is SchedulerOutput


@pytest.mark.usefixtures("one_round")
def test_unknown_requests_use_vllms_scheduler(configs):
    run = Run(DecodeScheduler, configs[False], 100)
    scheduler = run.scheduler
    assert isinstance(scheduler, DecodeScheduler)

    def steps(n):
        for _ in range(n):
            scheduled = run.schedule()
            run.update(scheduled, {one: [9] for one in scheduled.num_scheduled_tokens})

    run.add("plain", [9] * 4, SamplingParams(max_tokens=50, logprobs=0))
    steps(5)
    assert scheduler.num_short_steps == 4
    run.add("special", [9] * 4, SamplingParams(max_tokens=50, logprobs=0, prompt_logprobs=1))
    steps(5)
    assert scheduler.num_short_steps == 4
