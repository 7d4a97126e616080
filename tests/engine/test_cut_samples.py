"""Samples that are cut and continued: the same tokens, log-probs of the weights that sampled."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import ray
from reference import by_key, counts, make_requests, random_prompts, send, tokens
from trainers import start_sender

LIMIT = 24
LONG = 100


@pytest.fixture(scope="module")
def sender(pool, reference):
    """Tests of other files change the reference's weights, or the engines'."""
    sender = start_sender(pool, reference)
    send(sender, pool)
    yield sender
    ray.kill(sender)


def sample_all(pool, requests):
    return by_key(list(pool.generate(requests)))


def test_a_sample_cut_anywhere_continues_as_if_it_were_not(pool, sender):
    prompts = random_prompts(20, 10, seed=5)
    requests = make_requests(prompts, samples=2, max_tokens=LIMIT)
    uncut = sample_all(pool, requests)
    assert {s.finish_reason for s in uncut.values()} == {"stop", "length"}
    # At each place once, and where the model stops.
    truncated = [key for key, sample in uncut.items() if sample.finish_reason == "length"]
    cut_at = {key: len(sample.token_ids) for key, sample in uncut.items()}
    cut_at |= {key: 1 + place % (LIMIT - 1) for place, key in enumerate(truncated)}
    assert set(cut_at.values()) >= set(range(1, LIMIT))
    parts = sample_all(pool, [replace(r, budget_tokens=cut_at[r.key]) for r in requests])
    continued = []
    for request in requests:
        whole, part, cut = uncut[request.key], parts[request.key], cut_at[request.key]
        assert tokens(part) == tokens(whole)[:cut]
        if len(whole.token_ids) <= cut:
            # A stop token in the place of the cut ends the sample; so does its limit.
            assert part == replace(whole, engine=part.engine) and part.finish_reason != "cut"
        else:
            assert part.finish_reason == "cut" and len(part.token_ids) == cut and part.text == ""
            continued.append(replace(request, begun=part))
    for key, sample in sample_all(pool, continued).items():
        whole = uncut[key]
        assert (tokens(sample), sample.text) == (tokens(whole), whole.text)
        assert (sample.finish_reason, sample.spans) == (whole.finish_reason, whole.spans)
        np.testing.assert_allclose(sample.log_probs, whole.log_probs, atol=1e-5)


def test_a_sample_may_be_cut_again_and_again_and_before_its_first_token(pool, sender):
    request = make_requests(random_prompts(1, 10, seed=5), samples=1, max_tokens=LIMIT)[0]
    request = replace(request, ignore_eos=True)
    whole = sample_all(pool, [request])[request.key]
    nothing = replace(
        whole, token_ids=np.zeros(0, np.int32), log_probs=np.zeros(0, np.float32), spans=((0, 0),)
    )
    begun, steps = nothing, 0
    while begun.finish_reason == "cut" or not begun.token_ids.size:
        part = replace(request, begun=begun, budget_tokens=5)
        begun = sample_all(pool, [part])[request.key]
        steps += 1
    assert steps == 5 and tokens(begun) == tokens(whole) and begun.finish_reason == "length"
    assert begun.spans == ((pool.weights_version, 0),)


def test_each_span_has_the_log_probs_of_the_weights_that_sampled_it(pool, sender, reference):
    prompts = random_prompts(4, 20, seed=9)
    requests = [
        replace(r, ignore_eos=True) for r in make_requests(prompts, samples=2, max_tokens=LIMIT)
    ]
    first = pool.weights_version
    begun, of_version = {r.key: None for r in requests}, {first: reference.tensors()}
    places = [0, 7, 8, LIMIT]
    for start, end in itertools.pairwise(places):
        parts = [replace(r, begun=begun[r.key], budget_tokens=end - start) for r in requests]
        begun = sample_all(pool, parts)
        if end < LIMIT:
            moved = reference.perturb(seed=end)
            ray.get(sender.set_tensors.remote(moved))
            of_version[send(sender, pool)] = moved
    versions = sorted(of_version)
    largest = dict.fromkeys(range(-1, 2), 0.0)
    for sample in begun.values():
        assert sample.spans == tuple(zip(versions, places[:-1], strict=True))
        assert sample.weights_version == versions[-1]
        assert sample.token_ages().tolist() == [2] * 7 + [1] + [0] * (LIMIT - 8)
    for place, version in enumerate(versions):
        reference.load(of_version[version])
        span = slice(places[place], places[place + 1])
        for sample in begun.values():
            of_model = reference.log_probs(prompts[sample.problem_id], sample, 1.0).numpy()
            np.testing.assert_allclose(sample.log_probs[span], of_model[span], atol=1e-5)
            # A label that is off by one token would show.
            for off in (-1, 1):
                moved_span = slice(max(0, span.start + off), span.stop + off)
                difference = np.abs(sample.log_probs[moved_span] - of_model[moved_span])
                largest[off] = max(largest[off], float(difference.max()))
    assert min(largest[-1], largest[1]) > 1e-3


def test_an_unfinished_request_has_one_key(pool, sender):
    request = make_requests(random_prompts(1, 10), samples=1)[0]
    with pytest.raises(ValueError, match="must differ"):
        list(pool.generate([request, request]))


def cut_when(pool, requests, tokens_so_far):
    """Sample until the engines have generated that many tokens, and cut what is unfinished."""

    def count_generated():
        return sum(generated for _, generated in counts(pool))

    begun = count_generated()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: list(pool.generate(requests)))
        while not running.done():
            if count_generated() - begun >= tokens_so_far:
                pool.cut()
                break
            time.sleep(0.01)
        return running.result(timeout=60)


def test_engines_continue_with_new_weights_after_any_cut(pool, sender, reference):
    """Every token has the log-prob of the weights that its span names. A few samples wait in the
    engines, and more on the driver, when they are cut."""
    prompts = random_prompts(20, 20, seed=4)
    requests = {
        r.key: replace(r, ignore_eos=True, max_tokens=LONG)
        for r in make_requests(prompts, samples=4)
    }
    of_version = {pool.weights_version: reference.tensors()}
    whole = {}
    begun = {}
    for seed in (21, 22):
        left = [
            replace(requests[key], begun=begun.get(key)) for key in requests if key not in whole
        ]
        for sample in cut_when(pool, left, 2000):
            found = begun if sample.finish_reason == "cut" else whole
            key = (sample.problem_id, sample.index)
            if len(sample.token_ids):
                found[key] = sample
        assert not any(unfinished for unfinished, _ in counts(pool))
        moved = reference.perturb(seed=seed)
        ray.get(sender.set_tensors.remote(moved))
        of_version[send(sender, pool)] = moved
    left = [replace(requests[key], begun=begun.get(key)) for key in requests if key not in whole]
    assert any(len(one.token_ids) < LONG for one in begun.values())
    whole |= sample_all(pool, left)
    assert whole.keys() == requests.keys()
    places = [start for sample in whole.values() for _, start in sample.spans[1:]]
    assert len(set(places)) > 1 and 0 not in places, "they are cut where they are"
    largest = dict.fromkeys(range(-1, 2), 0.0)
    for version, weights in of_version.items():
        reference.load(weights)
        for sample in whole.values():
            of_model = reference.log_probs(prompts[sample.problem_id], sample, 1.0).numpy()
            ends = [start for _, start in sample.spans[1:]] + [LONG]
            for (named, start), end in zip(sample.spans, ends, strict=True):
                if named != version:
                    continue
                for off in largest:
                    span = slice(max(0, start + off), min(LONG, end + off))
                    difference = np.abs(sample.log_probs[span] - of_model[span])
                    largest[off] = max(largest[off], float(difference.max(initial=0.0)))
    assert largest[0] < 3e-5 and min(largest[-1], largest[1]) > 1e-3


def test_requests_after_the_cut_are_cut(pool, sender):
    """A call that an engine gets late must not run on while the weights change."""
    request = make_requests(random_prompts(1, 10), samples=1)[0]
    assert not list(pool.generate([]))
    engine, number = pool.engines[0], 10**6
    ray.get(engine.cut.remote(number))
    progress = ray.get(engine.exchange.remote(number, [request], 5.0))
    assert [s.finish_reason for s in progress.samples] == ["cut"]
    assert not len(progress.samples[0].token_ids) and not progress.unfinished
    # The next round is another.
    progress = ray.get(engine.exchange.remote(number + 2, [request], 30.0))
    assert [s.finish_reason for s in progress.samples] != ["cut"]
    pool.generation.number = number + 2
