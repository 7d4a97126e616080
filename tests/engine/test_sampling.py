"""Samples of real engines: random streams, log-probabilities, limits, delivery."""

from dataclasses import replace

import pytest
import ray
from reference import (
    END_OF_TEXT_ID,
    VOCABULARY,
    by_key,
    counts,
    make_requests,
    random_prompts,
    send,
    tokens,
)
from trainers import start_sender


@pytest.fixture(scope="module", autouse=True)
def weights_of_the_reference(pool, reference):
    """Tests of other files change the reference's weights, or the engines'."""
    sender = start_sender(pool, reference)
    send(sender, pool)
    ray.kill(sender)


def test_each_request_gives_one_sample_with_all_its_fields(pool):
    requests = make_requests(random_prompts(5, 12), samples=4)
    samples = list(pool.generate(requests))
    assert sorted((s.problem_id, s.index) for s in samples) == sorted(r.key for r in requests)
    seeds = {request.key: request.seed for request in requests}
    for sample in samples:
        assert len(sample.token_ids) == len(sample.log_probs) <= 24
        assert (sample.token_ids.dtype, sample.log_probs.dtype) == ("int32", "float32")
        if sample.finish_reason == "length":
            assert len(sample.token_ids) == 24
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == END_OF_TEXT_ID)
        assert END_OF_TEXT_ID not in sample.token_ids[:-1]
        assert sample.seed == seeds[(sample.problem_id, sample.index)]
        assert sample.weights_version == pool.weights_version
        assert "<|" not in sample.text
    assert {sample.engine for sample in samples} == {0, 1}


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_on_the_other_engine(pool):
    # More requests than fit at once, so that some wait and join a running batch.
    requests = make_requests(random_prompts(20, 10, seed=1), samples=5)
    crowd = by_key(list(pool.generate(requests)))
    few = by_key(list(pool.generate(list(reversed(requests))[:11])))
    for key, sample in few.items():
        assert tokens(sample) == tokens(crowd[key])
    assert any(few[key].engine != crowd[key].engine for key in few)
    alone = next(iter(pool.generate([requests[42]])))
    assert tokens(alone) == tokens(crowd[requests[42].key])
    assert len({tokens(sample) for sample in crowd.values()}) > 90


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_at_the_sampling_temperature(pool, reference, temperature):
    prompts = random_prompts(4, 30, seed=2)
    requests = make_requests(prompts, samples=3, temperature=temperature)
    samples = list(pool.generate(requests))
    assert reference.largest_difference(prompts, samples, temperature) < 1e-4


def test_temperature_0_takes_the_likeliest_token(pool, reference):
    prompts = random_prompts(2, 20, seed=3)
    samples = list(pool.generate(make_requests(prompts, samples=2, temperature=0.0)))
    first, second = ([tokens(s) for s in samples if s.problem_id == f"problem-{i}"] for i in (0, 1))
    assert first[0] == first[1] and second[0] == second[1]
    for sample in samples:
        likeliest = reference.logits(prompts[sample.problem_id], sample).argmax(dim=-1)
        assert tokens(sample) == tuple(likeliest.tolist())


def test_a_small_top_p_leaves_only_likely_tokens(pool):
    prompts = random_prompts(2, 20, seed=4)
    narrow = list(pool.generate(make_requests(prompts, samples=4, temperature=0.6, top_p=1e-6)))
    for problem_id in prompts:
        of_problem = [tokens(s) for s in narrow if s.problem_id == problem_id]
        assert len(set(of_problem)) == 1


def test_padding_of_the_vocabulary_is_never_sampled(pool):
    prompts = random_prompts(4, 8, seed=5)
    samples = list(pool.generate(make_requests(prompts, samples=8, temperature=2.0)))
    drawn = [token for sample in samples for token in tokens(sample)]
    # Random weights: nearly uniform over 261 ids. Of vLLM's 320 rows one in five is padding.
    assert len(drawn) > 300
    assert max(drawn) < VOCABULARY
    assert len(set(drawn)) > 150


def test_ignore_eos_samples_to_the_limit(pool):
    requests = make_requests(random_prompts(4, 8, seed=8), samples=8, max_tokens=100)
    fixed = [replace(request, ignore_eos=True) for request in requests]
    assert {len(sample.token_ids) for sample in pool.generate(fixed)} == {100}
    assert min(len(sample.token_ids) for sample in pool.generate(requests)) < 100


def test_a_caller_that_stops_early_leaves_nothing_behind(pool):
    prompts = random_prompts(6, 10, seed=6)
    generation = pool.generate(make_requests(prompts, samples=8, max_tokens=400))
    next(generation)
    # The one that answered: its prompts of 10 tokens, and what it has generated.
    assert max(pool.generation.tokens_held) > 10 * 23
    generation.close()
    assert [unfinished for unfinished, _ in counts(pool)] == [0, 0]
    again = list(pool.generate(make_requests(prompts, samples=1)))
    assert len(again) == 6
    # Told after each answer: what was dropped and what has finished is held no more.
    assert pool.generation.tokens_held == [0, 0]


def test_unsampleable_requests_are_refused_before_sending(pool):
    prompts = random_prompts(1, 500, seed=7)
    with pytest.raises(ValueError, match=r"problem-0.*500.*24.*524.*512"):
        list(pool.generate(make_requests(prompts, samples=1)))
    twice = make_requests(random_prompts(1, 10), samples=1) * 2
    with pytest.raises(ValueError, match="2 requests have 1 new keys"):
        list(pool.generate(twice))
    unlikely = make_requests(random_prompts(1, 10), samples=1)
    assert len(list(pool.generate(unlikely))) == 1


def test_an_engine_starts_without_the_compiler_and_its_collector_runs_again(pool):
    def look(_):
        import gc
        import sys

        import torch

        compiler = "torch._inductor.lowering" in sys.modules
        return compiler, torch.compile.__module__ == "torch", gc.isenabled()

    for engine in pool.engines:
        assert ray.get(engine.call_engine.remote(look)) == (False, True, True)
