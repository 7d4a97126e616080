import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.rotary import rope_inverse_frequencies
from rlmath.engines.worker_state import worker_constants
from rlmath.errors import WeightsError
from rlmath.model.published import KNOWN
from rlmath.model.rope import Rope
from rlmath.model.spec import model_spec
from rlmath.training.checks.engine_constants import check_constants, wrong_constant
from rlmath.training.checks.prefix_cache import check_prefix_cache

SPEC = model_spec(KNOWN["Qwen3-8B"])
LLAMA3 = Rope(
    500000.0,
    "llama3",
    {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
LINEAR = Rope(10000.0, "linear", {"factor": 4.0})
YARN = Rope(10000.0, "yarn", {"factor": 16.0, "original_max_position_embeddings": 2048})


def worker(spec, dtype, epsilon=None, own=False):
    """A vLLM worker with a norm and a rotary embedding, ``own``: one of transformers."""
    inverse, factor = rope_inverse_frequencies(spec)
    angles = torch.outer(torch.arange(128).float(), inverse)
    cache = torch.cat([angles.cos(), angles.sin()], 1) * factor
    norm = SimpleNamespace(variance_epsilon=spec.norm_eps if epsilon is None else epsilon)
    rotary = SimpleNamespace(cos_sin_cache=cache.to(dtype))
    if own:
        rotary = torch.nn.Module()
        rotary.register_buffer("inv_freq", inverse, persistent=False)
        rotary.attention_scaling = factor
    modules = [norm, rotary, SimpleNamespace()]
    model = SimpleNamespace(modules=lambda: modules)
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [SPEC.rope, LLAMA3, LINEAR, YARN], ids=lambda one: one.kind)
def test_equal_numbers_pass_and_others_do_not(dtype, rope):
    spec = dataclasses.replace(SPEC, rope=rope)
    assert wrong_constant(worker_constants(worker(spec, dtype)), spec) is None
    found = worker_constants(worker(spec, dtype, epsilon=1e-5))
    assert "epsilon 1e-05, and the actor 1e-06" in str(wrong_constant(found, spec))
    other = dataclasses.replace(rope, theta=rope.theta * 1.2)
    found = worker_constants(worker(dataclasses.replace(spec, rope=other), dtype))
    assert f"rope {rope.kind}, theta {rope.theta:g}" in str(wrong_constant(found, spec))


def test_frequencies_of_models_that_transformers_computes():
    """vLLM takes OLMo-2 from there."""
    right = worker_constants(worker(SPEC, torch.float32, own=True))
    assert (
        len(right["ropes"][0]["values"]) == SPEC.rotary_dim and wrong_constant(right, SPEC) is None
    )
    rope = dataclasses.replace(SPEC.rope, theta=SPEC.rope.theta * 1.2)
    other = dataclasses.replace(SPEC, rope=rope)
    found = worker_constants(worker(other, torch.float32, own=True))
    assert "different rotary frequencies" in str(wrong_constant(found, SPEC))


def test_the_engine_is_named():
    right = worker_constants(worker(SPEC, torch.float32))
    wrong = worker_constants(worker(SPEC, torch.float32, epsilon=1e-5))
    pool = SimpleNamespace(ask=lambda _: [[right], [right, wrong]])
    with pytest.raises(WeightsError, match="engine 1 has an RMS norm with epsilon 1e-05"):
        check_constants(pool, SPEC)


def test_prefixes_of_old_weights_are_found():
    pool = SimpleNamespace(ask=lambda _: [0, 0], weights_version=3)
    check_prefix_cache(pool)
    pool.ask = lambda _: [0, 5]
    with pytest.raises(WeightsError, match="engine 1 still has 5 blocks in its prefix cache"):
        check_prefix_cache(pool)
