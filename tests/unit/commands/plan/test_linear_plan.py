import dataclasses

import pytest

from rlmath.commands.plan.activations import DELTA_CHUNK, layer_bytes, whole_layer_bytes
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.engine_memory import kv_bytes
from rlmath.commands.plan.models import (
    active_matrices,
    expert_parameters_of_rank,
    parameters_of_rank,
)
from rlmath.commands.plan.time import forward_flops
from rlmath.device.delta_rule import CHUNK
from rlmath.model.parallel import Layout
from rlmath.model.published import published_spec

# Parameters of the text model, as its publisher counts them; Qwen3-Next's is the hub's.
PUBLISHED = {
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
}
NAMES = list(PUBLISHED)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_published_weights_together(name):
    spec = published_spec(name)
    assert spec.num_parameters == PUBLISHED[name]
    one = Layout(1)
    whole = parameters_of_rank(spec, one, 0) + expert_parameters_of_rank(spec, one, 0)
    assert whole == spec.num_parameters
    stages = Layout(1, 4)
    parts = (parameters_of_rank(spec, stages, n) for n in range(4))
    experts = (expert_parameters_of_rank(spec, stages, n) for n in range(4))
    assert sum(parts) + sum(experts) == whole
    halves = Layout(2, 1)
    assert parameters_of_rank(spec, halves, 0) < 0.52 * parameters_of_rank(spec, one, 0)


def test_a_sequence_has_a_state_and_few_keys():
    """Qwen3-Next-80B-A3B: 36 of 48 layers have a state of 2 MiB each, 12 have keys and values."""
    spec = published_spec("Qwen3-Next-80B-A3B-Instruct")
    state = 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert kv_bytes(spec, 1) == 2 * 2 * 12 * 2 * 256
    assert 1000 * kv_bytes(spec, 1, sequence_tokens=1000) == 1000 * kv_bytes(spec, 1) + state
    assert 1000 * kv_bytes(spec, 2, sequence_tokens=1000) == 1000 * kv_bytes(spec, 2) + state / 2


def test_operations_of_linear_layers_do_not_grow_with_the_sequence():
    spec = published_spec("Qwen3.5-9B")
    more = forward_flops(spec, 65536) - forward_flops(spec, 32768)
    assert more == 8 * 2 * 2 * 16 * 256 * 32768 / 2
    fixed = forward_flops(spec, 0) - 2 * (active_matrices(spec) + spec.vocab * spec.hidden)
    assert fixed == 24 * 32 * (6 * 128 * 128 + 64 * 8 * 128)
    assert DELTA_CHUNK == CHUNK


def test_recomputed_attention_drops_what_is_between_the_matrices():
    """Qwen3.5-9B: 24 of 32 layers have 8192 channels, values of 4096 and rows of 32 systems."""
    spec = published_spec("Qwen3.5-9B")
    actor = ActorShape(Layout(2), 0, 1, "local", recompute_modules=("core_attn",))
    saved = whole_layer_bytes(spec, actor) - layer_bytes(spec, actor)
    mean = (24 * 2 * (8192 + 4096 + 64 * 32) + 8 * 4 * 16) / 32
    assert saved == pytest.approx(mean / 2)


def test_a_stage_without_attention():
    """Layers 0 and 1 alone; and a model that has no others."""
    spec = published_spec("Qwen3.5-9B")
    short = dataclasses.replace(spec, layers=2, linear_layers=(0, 1))
    assert parameters_of_rank(short, Layout(1), 0) == short.num_parameters
