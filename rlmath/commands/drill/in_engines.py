"""Faults in the engines: in vLLM's workers, in its engine, or in the actor around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from rlmath.commands.drill.fault import Fault, Scene
from rlmath.config.lora import LoraRollout
from rlmath.config.rollout import keeps_kv
from rlmath.config.schema import Config
from rlmath.engines.worker_state import inverse_frequencies
from rlmath.errors import ModelError
from rlmath.model.spec import ModelSpec, read_model_spec

_KEPT = "_kept_by_drill"
TEMPERATURE = 1.25
ROPE_THETA = 1.2
EPSILON = 10.0
SCALE = 4.0


@contextlib.contextmanager
def in_workers(
    scene: Scene, plant: Callable[[Any], None], back: Callable[[Any], None]
) -> Iterator[None]:
    """Run a function in every vLLM worker, and another at the end."""
    pool = scene.run.sampling.pool
    pool.call_workers(plant)
    try:
        yield
    finally:
        pool.call_workers(back)


def other_epsilon(worker: Any) -> None:
    """RMS norms with ten times their epsilon."""
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "variance_epsilon"):
            module.__dict__[_KEPT] = module.variance_epsilon
            module.variance_epsilon *= EPSILON


def epsilon_back(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        if _KEPT in module.__dict__ and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = module.__dict__.pop(_KEPT)


def other_rope(worker: Any) -> None:
    """Rotary embeddings with 1.2 times their base frequency, whatever their scaling."""
    import torch

    for module in _rotary(worker):
        cache = module.cos_sin_cache
        module.__dict__[_KEPT] = cache.clone()
        half = cache.shape[1] // 2
        cos, sin = cache[1, :half].double(), cache[1, half:].double()
        frequencies = torch.atan2(sin, cos) * ROPE_THETA ** -(torch.arange(half).double() / half)
        size = torch.hypot(cos, sin)
        angles = torch.outer(torch.arange(len(cache)).double(), frequencies)
        cache.copy_(torch.cat([size * angles.cos(), size * angles.sin()], 1).to(cache.dtype))
    for module in worker.model_runner.get_model().modules():
        for name, inverse in inverse_frequencies(module):
            module.__dict__.setdefault(_KEPT, {})[name] = inverse.clone()
            count = len(inverse)
            inverse *= ROPE_THETA ** -(torch.arange(count).to(inverse) / count)


def rope_back(worker: Any) -> None:
    for module in _rotary(worker):
        if _KEPT in module.__dict__:
            module.cos_sin_cache.copy_(module.__dict__.pop(_KEPT))
    for module in worker.model_runner.get_model().modules():
        for name, inverse in inverse_frequencies(module):
            inverse.copy_(module.__dict__.get(_KEPT, {}).pop(name, inverse))


def _rotary(worker: Any) -> list[Any]:
    """Each rotary embedding once; layers share them."""
    found: dict[int, Any] = {}
    for module in worker.model_runner.get_model().modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            found.setdefault(cache.data_ptr(), module)
    return list(found.values())


def other_scale(worker: Any) -> None:
    """The attention of every layer but the first with four times its scale."""
    for implementation in _attentions(worker)[1:]:
        implementation.__dict__[_KEPT] = implementation.scale
        implementation.scale *= SCALE


def scale_back(worker: Any) -> None:
    for implementation in _attentions(worker):
        if _KEPT in implementation.__dict__:
            implementation.scale = implementation.__dict__.pop(_KEPT)


def _attentions(worker: Any) -> list[Any]:
    """Attention implementation of each layer, in order."""
    found = (getattr(one, "impl", None) for one in worker.model_runner.get_model().modules())
    return [one for one in found if hasattr(one, "scale")]


@contextlib.contextmanager
def stale_prefixes(scene: Scene) -> Iterator[None]:
    """The prefix cache keeps blocks of the old weights."""
    pool = scene.run.sampling.pool
    pool.call_engines(keep_prefixes)
    try:
        yield
    finally:
        pool.call_engines(forget_prefixes)


def keep_prefixes(engine: Any) -> None:
    """vLLM says that the cache is reset, and it is not."""
    engine.reset_prefix_cache = lambda *arguments, **options: True


def forget_prefixes(engine: Any) -> None:
    engine.__dict__.pop("reset_prefix_cache", None)
    engine.reset_prefix_cache()


@contextlib.contextmanager
def in_actors(
    scene: Scene, plant: Callable[[Any], None], back: Callable[[Any], None]
) -> Iterator[None]:
    """Run a function in the Ray actor of every engine, and another at the end."""
    import ray

    def in_all(function: Callable[[Any], None]) -> None:
        # Engines may have been restarted since.
        engines = scene.run.sampling.pool.engines
        ray.get([engine.__ray_call__.remote(function) for engine in engines])

    in_all(plant)
    try:
        yield
    finally:
        in_all(back)


def with_requests(engine: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Change fields of each request that is handed to the engine."""
    submit = engine._loop.submit

    def submitting(generation: int, requests: Any) -> None:
        submit(generation, [dataclasses.replace(one, **change(one)) for one in requests])

    engine._loop.submit = submitting


def requests_back(engine: Any) -> None:
    engine._loop.__dict__.pop("submit", None)


def other_temperature(engine: Any) -> None:
    """Requests are sampled at 1.25 times their temperature."""
    with_requests(engine, lambda one: {"temperature": one.temperature * TEMPERATURE})


def other_prompt(engine: Any) -> None:
    """The first token of each prompt is lost."""
    with_requests(engine, lambda one: {"prompt_token_ids": one.prompt_token_ids[1:]})


def spec_of(model: str) -> ModelSpec | None:
    try:
        return read_model_spec(model)
    except ModelError:
        return None  # There is none yet.


def _no_prefix_cache(config: Config) -> str | None:
    if not config.rollout.prefix_caching:
        return "rollout.prefix_caching=false: there is no prefix cache"
    if keeps_kv(config.rollout):
        return "rollout.kv=keep: the prefix cache outlives a weight sync"
    if config.actor.lora.rollout is LoraRollout.unmerged:
        return "actor.lora.rollout=unmerged: a prefix's hash has the weights version in it"
    spec = spec_of(config.model.path)
    # A drill is on a CPU.
    if spec is not None and spec.latent is not None:
        return "latent attention: vLLM has no prefix cache for it on a CPU"
    if spec is not None and spec.linear is not None:
        return "linear attention: CPU engines keep no prefixes"
    return None


GATE = r"mean exp\|logp_actor - logp_engine\|"
FAULTS = (
    Fault(
        "temperature",
        f"the engine samples at {TEMPERATURE:g} times the temperature",
        "engine",
        "gate: log-probs of actor and engine",
        GATE,
        functools.partial(in_actors, plant=other_temperature, back=requests_back),
    ),
    Fault(
        "other_prompt",
        "the engine reads prompts without their first token",
        "engine",
        "check: prompts of the engines' requests, or the gate",
        rf"continues another prompt than its problem's|was begun after another prompt|{GATE}",
        functools.partial(in_actors, plant=other_prompt, back=requests_back),
    ),
    Fault(
        "rope_theta",
        f"the engine's rope theta is {ROPE_THETA:g} times the model's",
        "engine",
        "gate, or the engine's numbers after the weight sync",
        rf"{GATE}|has different rotary frequencies",
        functools.partial(in_workers, plant=other_rope, back=rope_back),
    ),
    Fault(
        "rms_epsilon",
        f"the engine's RMS epsilon is {EPSILON:g} times the model's",
        "engine",
        "gate, or the engine's numbers after the weight sync",
        rf"{GATE}|has an RMS norm with epsilon",
        functools.partial(in_workers, plant=other_epsilon, back=epsilon_back),
    ),
    Fault(
        "attention_scale",
        f"the engine's attention has {SCALE:g} times its scale from the second layer on",
        "engine",
        "gate, which names the layer",
        GATE,
        functools.partial(in_workers, plant=other_scale, back=scale_back),
    ),
    Fault(
        "prefix_cache",
        "the prefix cache is not reset after a weight sync",
        "engine",
        "blocks left in the cache after the weight sync",
        r"still has \d+ blocks in its prefix cache",
        stale_prefixes,
        missing=_no_prefix_cache,
    ),
)
