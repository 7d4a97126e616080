"""Samples that are cut and continued: the same tokens, log-probs of the weights that sampled."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from conftest import start_sender
from reference import (
    Reference,
    by_key,
    make_requests,
    random_prompts,
    send,
    tokens,
)

from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import Request
from rlmath.types import Sample

LIMIT = 24


@pytest.fixture(scope="module")
def sender(pool: RolloutPool, reference: Reference) -> Any:
    """Tests of other files change the reference's weights, or the engines'."""
    sender = start_sender(pool, reference)
    send(sender, pool)
    yield sender
    ray.kill(sender)


def sampled(pool: RolloutPool, requests: list[Request]) -> dict[tuple[str, int], Sample]:
    return by_key(list(pool.generate(requests)))


def test_a_sample_cut_anywhere_continues_as_if_it_were_not(pool: RolloutPool, sender: Any) -> None:
    prompts = random_prompts(20, 10, seed=5)
    requests = make_requests(prompts, samples=2, max_tokens=LIMIT)
    uncut = sampled(pool, requests)
    assert {s.finish_reason for s in uncut.values()} == {"stop", "length"}
    # At each place once, and where the model stops.
    truncated = [key for key, sample in uncut.items() if sample.finish_reason == "length"]
    cut_at = {key: len(sample.token_ids) for key, sample in uncut.items()}
    cut_at |= {key: 1 + place % (LIMIT - 1) for place, key in enumerate(truncated)}
    assert set(cut_at.values()) >= set(range(1, LIMIT))
    parts = sampled(pool, [replace(r, budget_tokens=cut_at[r.key]) for r in requests])
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
    for key, sample in sampled(pool, continued).items():
        whole = uncut[key]
        assert (tokens(sample), sample.text) == (tokens(whole), whole.text)
        assert (sample.finish_reason, sample.spans) == (whole.finish_reason, whole.spans)
        np.testing.assert_allclose(sample.log_probs, whole.log_probs, atol=1e-5)


def test_a_sample_may_be_cut_again_and_again_and_before_its_first_token(
    pool: RolloutPool, sender: Any
) -> None:
    request = make_requests(random_prompts(1, 10, seed=5), samples=1, max_tokens=LIMIT)[0]
    request = replace(request, ignore_eos=True)
    whole = sampled(pool, [request])[request.key]
    nothing = replace(
        whole, token_ids=np.zeros(0, np.int32), log_probs=np.zeros(0, np.float32), spans=((0, 0),)
    )
    begun, steps = nothing, 0
    while begun.finish_reason == "cut" or not begun.token_ids.size:
        part = replace(request, begun=begun, budget_tokens=5)
        begun = sampled(pool, [part])[request.key]
        steps += 1
    assert steps == 5 and tokens(begun) == tokens(whole) and begun.finish_reason == "length"
    assert begun.spans == ((pool.weights_version, 0),)


def test_each_span_has_the_log_probs_of_the_weights_that_sampled_it(
    pool: RolloutPool, sender: Any, reference: Reference
) -> None:
    prompts = random_prompts(4, 20, seed=9)
    requests = [
        replace(r, ignore_eos=True) for r in make_requests(prompts, samples=2, max_tokens=LIMIT)
    ]
    first = pool.weights_version
    begun, of_version = {r.key: None for r in requests}, {first: reference.tensors()}
    places = [0, 7, 8, LIMIT]
    for start, end in itertools.pairwise(places):
        parts = [replace(r, begun=begun[r.key], budget_tokens=end - start) for r in requests]
        begun = sampled(pool, parts)
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


def test_an_unfinished_request_has_one_key(pool: RolloutPool, sender: Any) -> None:
    request = make_requests(random_prompts(1, 10), samples=1)[0]
    with pytest.raises(ValueError, match="each has another"):
        list(pool.generate([request, request]))
