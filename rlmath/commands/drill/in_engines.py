"""Faults in the engines: in vLLM's workers, in its engine, or in the actor around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from rlmath.commands.drill.fault import Fault, Scene, sentence
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
GATE = r"mean exp\|logp_actor - logp_engine\|"
NUMBERS = "gate, or the engine's numbers after the weight sync"
FAULTS: list[Fault] = []
# Plants a fault in a process of an engine; gets vLLM's worker, its engine, or the Ray actor.
EnginePlant = Callable[[Any], None]


def in_workers(scene: Scene, function: EnginePlant) -> None:
    scene.run.sampling.pool.call_workers(function)


def in_engine(scene: Scene, function: EnginePlant) -> None:
    scene.run.sampling.pool.call_engines(function)


def in_actors(scene: Scene, function: EnginePlant) -> None:
    import ray

    # Engines may have been restarted since.
    engines = scene.run.sampling.pool.engines
    ray.get([engine.__ray_call__.remote(function) for engine in engines])


@contextlib.contextmanager
def plant_in_engines(
    scene: Scene, call: Callable[[Scene, EnginePlant], None], plant: EnginePlant
) -> Iterator[None]:
    """Run ``plant`` where ``call`` runs functions, and undo it at the end."""
    call(scene, plant)
    try:
        yield
    finally:
        call(scene, put_back)


def engine_fault(
    name: str, alarm: str, says: str, call: Callable[[Scene, EnginePlant], None], **more: Any
) -> Callable[[EnginePlant], EnginePlant]:
    """Register a function that plants a fault in an engine; see ``fault.scene_fault``."""

    def register(plant: EnginePlant) -> EnginePlant:
        own = functools.partial(plant_in_engines, call=call, plant=plant)
        FAULTS.append(Fault(name, sentence(plant), "engine", alarm, says, own, **more))
        return plant

    return register


def _when_undone(part: Any, undo: Callable[[], None]) -> None:
    """Note how to undo a fault of a worker, an engine or an actor."""
    part = getattr(part, "model_runner", part)
    part.__dict__.setdefault(_KEPT, []).append(undo)


def _set(part: Any, owner: Any, name: str, value: Any) -> None:
    _when_undone(part, functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def put_back(part: Any) -> None:
    """Undo all that is planted in a worker, an engine or an actor."""
    for undo in reversed(getattr(part, "model_runner", part).__dict__.pop(_KEPT, [])):
        undo()


def _modules(worker: Any) -> list[Any]:
    return list(worker.model_runner.get_model().modules())


def _with_requests(engine: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Change fields of each request that is handed to the engine."""
    submit = engine._loop.submit

    def submitting(generation: int, requests: Any) -> None:
        submit(generation, [dataclasses.replace(one, **change(one)) for one in requests])

    _set(engine, engine._loop, "submit", submitting)


@engine_fault("temperature", "gate: log-probs of actor and engine", GATE, in_actors)
def other_temperature(engine: Any) -> None:
    """The engine samples at 1.25 times the temperature."""
    _with_requests(engine, lambda one: {"temperature": one.temperature * TEMPERATURE})


@engine_fault(
    "other_prompt",
    "check: prompts of the engines' requests, or the gate",
    rf"continues another prompt than its problem's|was begun after another prompt|{GATE}",
    in_actors,
)
def other_prompt(engine: Any) -> None:
    """The engine reads prompts without their first token."""
    _with_requests(engine, lambda one: {"prompt_token_ids": one.prompt_token_ids[1:]})


@engine_fault("rope_theta", NUMBERS, rf"{GATE}|has different rotary frequencies", in_workers)
def other_rope(worker: Any) -> None:
    """The engine's rope theta is 1.2 times the model's."""
    import torch

    found: dict[int, Any] = {}  # Layers share them.
    for module in _modules(worker):
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            found.setdefault(cache.data_ptr(), cache)
    for cache in found.values():
        _when_undone(worker, functools.partial(cache.copy_, cache.clone()))
        half = cache.shape[1] // 2
        cos, sin = cache[1, :half].double(), cache[1, half:].double()
        frequencies = torch.atan2(sin, cos) * ROPE_THETA ** -(torch.arange(half).double() / half)
        size = torch.hypot(cos, sin)
        angles = torch.outer(torch.arange(len(cache)).double(), frequencies)
        cache.copy_(torch.cat([size * angles.cos(), size * angles.sin()], 1).to(cache.dtype))
    for module in _modules(worker):
        for _, inverse in inverse_frequencies(module):
            _when_undone(worker, functools.partial(inverse.copy_, inverse.clone()))
            count = len(inverse)
            inverse *= ROPE_THETA ** -(torch.arange(count).to(inverse) / count)


@engine_fault("rms_epsilon", NUMBERS, rf"{GATE}|has an RMS norm with epsilon", in_workers)
def other_epsilon(worker: Any) -> None:
    """The engine's RMS epsilon is 10 times the model's."""
    for module in _modules(worker):
        if hasattr(module, "variance_epsilon"):
            _set(worker, module, "variance_epsilon", EPSILON * module.variance_epsilon)


@engine_fault("attention_scale", "gate, which names the layer", GATE, in_workers)
def other_scale(worker: Any) -> None:
    """The engine's attention has 4 times its scale from the second layer on."""
    found: list[Any] = [getattr(module, "impl", None) for module in _modules(worker)]
    for implementation in [one for one in found if hasattr(one, "scale")][1:]:
        _set(worker, implementation, "scale", SCALE * implementation.scale)


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


@engine_fault(
    "prefix_cache",
    "blocks left in the cache after the weight sync",
    r"still has \d+ blocks in its prefix cache",
    in_engine,
    missing=_no_prefix_cache,
)
def keep_prefixes(engine: Any) -> None:
    """The prefix cache is not reset after a weight sync."""
    # vLLM says that it is. Undone in the opposite order: the method first, then the blocks.
    _when_undone(engine, lambda: engine.reset_prefix_cache())
    _set(engine, engine, "reset_prefix_cache", lambda *arguments, **options: True)
