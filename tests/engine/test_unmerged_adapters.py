"""Adapters that a weight sync brings alone, and that vLLM computes beside the base model."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import ray
import torch
from adapters import Trainer, merge
from reference import by_key, make_requests, random_prompts, send, tokens
from trainers import SenderTrainer, start_sender

from rlmath.engines.requests import Request
from rlmath.errors import WeightsError
from rlmath.model.lora import Lora
from rlmath.rollout.pool import RolloutPool
from rlmath.types import Sample
from rlmath.weights.fingerprint import compare_fingerprints

LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def spec(engine_spec, tmp_path_factory):
    log_dir = str(tmp_path_factory.mktemp("adapters"))
    return replace(engine_spec, tensor_parallel=2, adapters=LORA, log_dir=log_dir)


@pytest.fixture(scope="module")
def unmerged_pool(ray_session, spec):
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def trainer(unmerged_pool, model_folder):
    return Trainer(unmerged_pool, model_folder, LORA)


def score(pool, requests, samples):
    """The same tokens with the log-probs of these engines, at temperature 1."""
    prompts = {request.key: request.prompt_token_ids for request in requests}
    found = pool.generate(
        [
            Request(
                problem_id=one.problem_id,
                index=one.index,
                prompt_token_ids=prompts[one.problem_id, one.index],
                max_tokens=len(one.token_ids) + 1,
                temperature=1.0,
                top_p=1.0,
                seed=0,
                begun=one,
                scores=True,
            )
            for one in samples
        ]
    )
    return list(found)


def test_engines_sample_with_the_adapters_of_each_sync(unmerged_pool, trainer, pool, reference):
    # Longer than a block, so that a prompt's keys and values are kept.
    prompts = random_prompts(4, 200, seed=3)
    requests = make_requests(prompts, samples=2)
    base = list(unmerged_pool.generate(requests))
    assert trainer.reference.largest_difference(prompts, base, 1.0) < 2e-5
    before = by_key(base)
    for seed in (1, 2):
        wanted = trainer.sync(seed)
        (held,) = unmerged_pool.weights_fingerprints()
        assert held == wanted
        found = list(unmerged_pool.generate(requests))
        assert trainer.reference.largest_difference(prompts, found, 1.0) < 1e-4
        assert all(one.spans == ((seed, 0),) for one in found)
        after = by_key(found)
        assert any(tokens(after[key]) != tokens(before[key]) for key in after)
        before = after
    # Engines with merged weights score the same samples.
    # The engines receive from the sender that was started last.
    sender = start_sender(pool, reference)
    ray.get(sender.set_tensors.remote(merge(trainer.base, trainer.sent)))
    try:
        send(sender, pool)
        theirs = by_key(score(pool, requests, found))
    finally:
        ray.get(sender.set_tensors.remote(reference.tensors()))
        send(sender, pool)
        ray.kill(sender)
    for key, one in after.items():
        assert abs(one.log_probs - theirs[key].log_probs).max() < 1e-4
    # A response that a later version continues is of both.
    (first,) = unmerged_pool.generate([replace(requests[0], budget_tokens=5)])
    assert first.finish_reason == "cut"
    trainer.sync(3)
    (whole,) = unmerged_pool.generate([replace(requests[0], begun=first)])
    assert whole.spans == ((2, 0), (3, 5)) and tokens(whole)[:5] == tokens(first)
    rest = Sample(**{**vars(whole), "token_ids": whole.token_ids})
    alone = trainer.reference.log_probs(prompts[whole.problem_id], rest, 1.0)[5:]
    assert (alone - torch.tensor(whole.log_probs)[5:]).abs().max() < 1e-4


def test_stale_lost_and_incomplete_adapters_are_found(unmerged_pool, trainer):
    wanted = trainer.sync(5)
    (engine,) = unmerged_pool.engines

    def workers(function):
        ray.get(engine.call_workers.remote(function))

    def flip(worker):
        modules = dict(worker.model_runner.get_model().named_modules())
        modules["model.layers.0.self_attn.qkv_proj"].lora_b_stacked[2][0, 0, 0, 0] += 1

    (held,) = unmerged_pool.weights_fingerprints()
    compare_fingerprints(wanted, held, "engine 0")
    # A slice is of the base model; the adapters are in each.
    (held,) = unmerged_pool.weights_fingerprints({"model.norm.weight": None})
    adapters = {name: value for name, value in wanted.items() if "lora_" in name}
    assert adapters and held == adapters | {"model.norm.weight": wanted["model.norm.weight"]}
    workers(flip)
    (held,) = unmerged_pool.weights_fingerprints()
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.v_proj\.lora_B.* differs"):
        compare_fingerprints(wanted, held, "engine 0")
    stale = trainer.sync(6)
    assert stale != wanted
    (held,) = unmerged_pool.weights_fingerprints()
    with pytest.raises(WeightsError, match="lora_A"):
        compare_fingerprints(wanted, held, "engine 0")

    def lose(worker):
        worker.model_runner.lora_manager.remove_all_adapters()

    workers(lose)
    (held,) = unmerged_pool.weights_fingerprints()
    with pytest.raises(WeightsError, match=r"lora_A\.weight is missing"):
        compare_fingerprints(stale, held, "engine 0")
    assert unmerged_pool.weights_version
    trainer.sync(7)


@pytest.mark.long
def test_an_engine_that_is_started_again_gets_the_adapters(ray_session, log_dir_spec, model_folder):
    requests = make_requests(random_prompts(4, 10), samples=8, max_tokens=400)
    spec = replace(log_dir_spec, adapters=LORA)
    own = SenderTrainer(adapters=True)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=60, max_restarts=1, trainer=own) as pool:
        trainer = Trainer(pool, model_folder, LORA)
        own.pool, own.sender = pool, trainer.sender
        wanted = trainer.sync(1)
        undisturbed = by_key(list(pool.generate(requests)))
        place = pool.processes[0].place()
        threading.Timer(0.4, os.kill, (place.pid, signal.SIGKILL)).start()
        again = by_key(list(pool.generate(requests)))
        assert pool.restarts == 1
        assert {key: tokens(one) for key, one in again.items()} == {
            key: tokens(one) for key, one in undisturbed.items()
        }
        assert pool.weights_fingerprints() == [wanted]
        wanted = trainer.sync(2)
        assert pool.weights_fingerprints() == [wanted]
