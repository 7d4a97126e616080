"""``rollout.kv=keep``: responses continue from keys and values of older weights; no other does."""

from dataclasses import replace

import numpy as np
import pytest
import ray
from reference import by_key, make_requests, random_prompts, send
from trainers import start_sender

from rlmath.engines.requests import CPU_BLOCK_TOKENS
from rlmath.rollout.pool import RolloutPool

PROMPT = 20
# Where samples are cut, in response tokens: within the second and the third block.
PLACES = (0, 140, 260, 300)


@pytest.fixture(scope="module")
def keeping(ray_session, engine_spec):
    with RolloutPool(replace(engine_spec, keeps_kv=True), num_engines=2, stall_timeout_s=120) as p:
        yield p


def sample_all(pool, requests):
    return by_key(list(pool.generate(requests)))


def update(pool, sender, reference, seed):
    moved = reference.perturb(seed)
    ray.get(sender.set_tensors.remote(moved))
    return send(sender, pool)


def test_samples_continue_from_the_keys_and_values_of_the_weights_before(keeping, reference):
    """The second and third span have the log-probs of a model whose cache holds what the spans
    before left in whole blocks. After that, a sample that begins sees nothing of it."""
    began = reference.tensors()
    sender = start_sender(keeping, reference)
    send(sender, keeping)
    weights = {keeping.weights_version: reference.tensors()}
    long_prompt = {"long": random_prompts(1, CPU_BLOCK_TOKENS + 72, seed=3)["problem-0"]}
    prompts = random_prompts(6, PROMPT, seed=2) | long_prompt
    requests = [
        replace(r, ignore_eos=True)
        for r in make_requests(prompts, samples=1, max_tokens=PLACES[-1])
    ]
    begun = {}
    engines = []
    for end, start in zip(PLACES[1:], PLACES, strict=False):
        parts = [
            replace(
                r,
                begun=begun.get(r.key),
                budget_tokens=end - start,
                stays_on=begun[r.key].engine if begun else None,
            )
            for r in requests
        ]
        begun = sample_all(keeping, parts)
        engines.append([begun[r.key].engine for r in requests])
        # The last sampled token has no keys and values.
        kept = [(len(r.prompt_token_ids) + start - 1) // CPU_BLOCK_TOKENS for r in requests]
        reused = CPU_BLOCK_TOKENS * sum(kept) if start else 0
        assert keeping.generation.tokens_reused == reused
        if end < PLACES[-1]:
            version = update(keeping, sender, reference, seed=end)
            weights[version] = reference.tensors()
    assert engines[0] == engines[1] == engines[2] and set(engines[0]) == {0, 1}
    spans = tuple(zip(weights, PLACES, strict=False))
    far = 0.0
    for request in requests:
        sample, prompt = begun[request.key], request.prompt_token_ids
        assert sample.spans == spans
        found = of_stale_cache(reference, weights, prompt, sample)
        np.testing.assert_allclose(sample.log_probs, found, atol=5e-5)
        last = reference.log_probs(prompt, sample, 1.0).numpy()
        far = max(far, float(np.abs(sample.log_probs - last)[PLACES[2] :].max()))
    assert far > 1e-3, "no single version of the weights gives these log-probs"
    fresh = make_requests(prompts, samples=2, max_tokens=24, step=1)
    for sample in sample_all(keeping, fresh).values():
        want = reference.log_probs(prompts[sample.problem_id], sample, 1.0).numpy()
        np.testing.assert_allclose(sample.log_probs, want, atol=5e-5)
    reference.load(began)
    ray.kill(sender)


def of_stale_cache(reference, weights, prompt, sample):
    """Log-probs of a sample's tokens, each span with the cache that the ones before it left."""
    past, kept, found = None, 0, []
    for (_, tensors), start, end in zip(weights.items(), PLACES, PLACES[1:], strict=False):
        reference.load(tensors)
        log_probs, past = reference.with_cache(prompt, sample, past, kept, end)
        found.append(log_probs[start:end])
        kept = (len(prompt) + end - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
        past.crop(kept)
    return np.concatenate(found)
