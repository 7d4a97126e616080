"""The routes of a MoE's tokens come with the samples, and are those of the model in transformers.

Of prefixes that were cached, after a weight sync, of samples that continue, and of those that were
preempted and computed again.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from reference import Reference, by_key, random_prompts, send
from reference import make_requests as plain_requests
from trainers import start_sender

from rlmath.engines.requests import CPU_BLOCK_TOKENS
from rlmath.engines.routes import RouteSpec
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from tests.support.models import make_for_engines

LIMIT = 24
# Rounding decides where the last expert that is taken and the first that is not are as close.
CLOSE = 1e-3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Layers 0, 2 and 3 have experts."""
    changes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.1,
    }
    return make_for_engines("qwen3_moe", tmp_path_factory.mktemp("mixture"), **changes)


@pytest.fixture(scope="module")
def routed_spec(engine_spec, mixture, tmp_path_factory):
    """With room for 12 blocks of keys and values."""
    routes = RouteSpec.of(read_model_spec(mixture))
    assert routes == RouteSpec((0, 2, 3), 8, 3)
    return replace(
        engine_spec,
        model_path=str(mixture),
        routes=routes,
        cpu_kv_cache_gib=12 * CPU_BLOCK_TOKENS * 2048 / 2**30,
        log_dir=str(tmp_path_factory.mktemp("routes")),
    )


@pytest.fixture(scope="module")
def routed_pool(ray_session, routed_spec):
    with RolloutPool(routed_spec, num_engines=1, stall_timeout_s=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def model(mixture):
    return Reference(mixture)


def make_requests(*arguments, **options):
    """Requests of training."""
    return [replace(one, wants_routes=True) for one in plain_requests(*arguments, **options)]


@torch.no_grad()
def choices(model, request, sample):
    """``[tokens, layers, k]`` sorted experts, and ``[tokens, layers]`` whether they are clear."""
    tokens = torch.tensor([[*request.prompt_token_ids, *sample.token_ids.tolist()]])
    logits = model._model(tokens, output_router_logits=True).router_logits
    found = torch.stack([one.float() for one in logits], dim=1)
    values, indices = found.topk(4, dim=-1)
    clear = values[..., 2] - values[..., 3] > CLOSE
    return indices[..., :3].sort(dim=-1).values.numpy(), clear.numpy()


def check(model, requests, samples, first=0):
    """The routes of each sample from its token ``first`` on are this model's."""
    for request in requests:
        sample = samples[request.key]
        count = len(request.prompt_token_ids) + len(sample.token_ids) - 1
        assert sample.routes is not None and sample.routes.dtype == np.uint8
        assert sample.routes.shape == (count, 3, 3)
        wanted, clear = choices(model, request, sample)
        equal = (np.sort(sample.routes, axis=-1) == wanted[:-1]).all(-1) | ~clear[:-1]
        assert clear.mean() > 0.9
        assert equal[first:].all()


def differences(model, requests, samples, takes_other):
    """The largest between the rollout log-probs and this model's with the samples' routes.

    Args:
        takes_other: Where experts tie, the model takes the other one of the two.
    """
    topk, found = torch.topk, 0.0
    for request in requests:
        sample = samples[request.key]
        layers = iter(range(sample.routes.shape[1]))

        def choose(scores, k, dim=-1):
            chosen = topk(scores, k, dim=dim).indices
            routes = torch.tensor(sample.routes[:, next(layers)]).long()  # noqa: B023
            if takes_other:
                # Experts 2i and 2i + 1 tie: of three that are chosen one is there without its twin.
                paired = (routes[..., :, None] ^ 1 == routes[..., None, :]).any(-1)
                routes = torch.where(paired, routes, routes ^ 1)
            chosen[:-1] = routes
            return scores.gather(dim, chosen), chosen

        with mock.patch("torch.topk", choose):
            own = model.log_probs(request.prompt_token_ids, sample, request.temperature)
        found = max(found, float((own - torch.tensor(sample.log_probs)).abs().max()))
    return found


def count_preemptions(engine):
    """Runs in the engine's process."""
    scheduler = engine.engine_core.engine_core.scheduler
    preempt, scheduler.preempted_here = scheduler._preempt_request, 0

    def count(*arguments, **options):
        scheduler.preempted_here += 1
        preempt(*arguments, **options)

    scheduler._preempt_request = count


def count_cached(engine):
    """Runs in the engine's process."""
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    computed, manager.cached_here = manager.get_computed_blocks, 0

    def count(*arguments, **options):
        found = computed(*arguments, **options)
        manager.cached_here += found[1]
        return found

    manager.get_computed_blocks = count


def cached_tokens(engine):
    """Tokens that were found in the cache; runs in the engine's process."""
    found = engine.engine_core.engine_core.scheduler.kv_cache_manager.cached_here
    return found


def test_routes_of_cached_prefixes_and_of_what_is_computed_again(routed_pool, model):
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    (engine,) = routed_pool.engines
    ray.get(engine.call_engine.remote(count_preemptions))
    # With a shared first block and an own second one all fit; not with a third one.
    prompts = random_prompts(2, 2 * CPU_BLOCK_TOKENS - 28, seed=1)
    requests = make_requests(prompts, samples=4, max_tokens=36)
    requests = [replace(one, ignore_eos=True) for one in requests]
    check(model, requests, by_key(list(routed_pool.generate(requests))))

    def preemptions(engine):
        found = engine.engine_core.engine_core.scheduler.preempted_here
        return found

    assert ray.get(engine.call_engine.remote(preemptions)) > 0
    # The prompts' first blocks are cached by now, and what they give is what counts.
    ray.get(engine.call_engine.remote(count_cached))
    again = make_requests(prompts, samples=2, max_tokens=8, step=1)
    check(model, again, by_key(list(routed_pool.generate(again))))
    assert ray.get(engine.call_engine.remote(cached_tokens)) >= 4 * CPU_BLOCK_TOKENS
    # As evaluations ask for theirs.
    bare = plain_requests(prompts, samples=1, max_tokens=8, step=2)
    assert [one.routes for one in routed_pool.generate(bare)] == [None, None]


def test_routes_after_a_weight_sync_and_of_samples_that_continue(routed_pool, model):
    sender = start_sender(routed_pool, model)
    send(sender, routed_pool)
    requests = make_requests(random_prompts(3, 10, seed=2), samples=1, max_tokens=LIMIT)
    requests = [replace(one, ignore_eos=True) for one in requests]
    parts = by_key(list(routed_pool.generate([replace(r, budget_tokens=9) for r in requests])))
    check(model, requests, parts)
    ray.get(sender.set_tensors.remote(model.perturb(seed=5)))
    send(sender, routed_pool)
    continued = [replace(r, begun=parts[r.key]) for r in requests]
    samples = by_key(list(routed_pool.generate(continued)))
    check(model, requests, samples, first=10 + 9 - 1)
    moved = 0
    for key, sample in samples.items():
        before, after = parts[key].routes, sample.routes
        assert before is not None and after is not None
        assert np.array_equal(after[: len(before)], before), "as they were sampled"
        fresh, _ = choices(model, requests[0], samples[requests[0].key])
        moved += int((np.sort(after[:10], axis=-1) != fresh[:10]).sum())
    assert moved > 0, "the weights before chose others"
    # A part without routes gets those of the pass that reads it again.
    bare = [replace(r, begun=replace(parts[r.key], routes=None)) for r in requests]
    check(model, requests, by_key(list(routed_pool.generate(bare))))

    # Experts that score the same in pairs, so that each third choice is a tie: whichever of the two
    # the engine took, its log-probs are those of the model that takes the same, and of no other.
    tied = {
        name: t.view(4, 2, -1)[:, :1].expand(-1, 2, -1).reshape(t.shape).contiguous()
        if name.endswith("gate.weight")
        else t
        for name, t in model.tensors().items()
    }
    model.load(tied)
    ray.get(sender.set_tensors.remote(tied))
    send(sender, routed_pool)
    samples = by_key(list(routed_pool.generate([replace(r, index=1) for r in requests])))
    requests = [replace(r, index=1) for r in requests]
    assert differences(model, requests, samples, takes_other=False) < 1e-4
    assert differences(model, requests, samples, takes_other=True) > 1e-3
    ray.kill(sender)


@pytest.mark.long
def test_an_engine_of_two_ranks(ray_session, routed_spec, mixture):
    spec = replace(routed_spec, tensor_parallel=2, cpu_kv_cache_gib=0.125)
    requests = make_requests(random_prompts(4, CPU_BLOCK_TOKENS + 12), samples=2, max_tokens=LIMIT)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        check(Reference(mixture), requests, by_key(list(pool.generate(requests))))
