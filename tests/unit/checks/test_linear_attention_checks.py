"""Models with linear attention: what actors and engines refuse, and the memory of a sequence."""

import dataclasses
import re

import pytest

from rlmath.checks import teacher
from rlmath.checks.files import model_folder
from rlmath.checks.layout import cpu_cache_problem, tensor_parallel_problems
from rlmath.checks.linear_attention import (
    linear_attention_problems,
    linear_engine_problems,
    linear_layout_problems,
)
from rlmath.checks.precision import batch_invariant_model
from rlmath.config.actor import Fp8, SharePrompts
from rlmath.config.load import load
from rlmath.config.schema import Config, Device, DType
from rlmath.config.shared_prompts import shares_prompts, sharing_problem
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

SPEC = model_spec(KNOWN["Qwen3.5-9B"])
GIVEN = ("model.path=m", "data.train_paths=[d]", "runner.run_dir=r")


@pytest.mark.parametrize(
    ("layout", "fp8", "says"),
    [
        (Layout(1, 1, 1, context_parallel=2), Fp8.none, "actor.context_parallel=2: the state"),
        (Layout(1, 1, 1), Fp8.hybrid, "actor.fp8=hybrid: linear attention"),
        (Layout(8, 1, 1), Fp8.none, "actor.tensor_parallel=8: .* use at most 4"),
    ],
    ids=str,
)
def test_linear_attention_refuses_incompatible_settings(layout, fp8, says):
    config = Config()
    assert not list(linear_attention_problems(config, SPEC, Layout(4, 2, 2)))
    config.actor.fp8 = fp8
    (message,) = linear_attention_problems(config, SPEC, layout)
    assert re.match(says, message)
    other = model_spec(KNOWN["Qwen3-8B"])
    assert not list(linear_attention_problems(config, other, layout))


def test_batch_invariance_is_refused():
    config = Config()
    assert not list(batch_invariant_model(config, SPEC))
    config.precision.batch_invariant = True
    (message,) = batch_invariant_model(config, SPEC)
    assert "linear attention" in message


def test_tensor_ranks_get_whole_heads_of_linear_attention():
    (message,) = tensor_parallel_problems("actor", 32, SPEC, 0)
    assert "16 key heads of linear attention / 32 leaves 16" in message


def test_prompts_are_not_shared_where_a_state_passes_through_them():
    assert "linear attention" in (sharing_problem(SPEC, "cpu", 1) or "")
    assert not shares_prompts(SharePrompts.auto, SPEC, "cpu", 1)


def test_models_with_images_are_refused_before_they_are_fetched():
    config = Config()
    for path, says in (
        ("Qwen/Qwen3.5-9B", "it has an image encoder; save its text model"),
        ("models/Qwen3.5-9B", "Qwen/Qwen3.5-9B is on the hub, but it has an image encoder"),
    ):
        config.model.path = path
        (message,) = model_folder(config)
        assert says in message
    config.model.path = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert not list(model_folder(config))


def problems(*settings, spec=SPEC, device=Device.cpu):
    config = load([*GIVEN, "model.dtype=bfloat16", *settings])
    return list(linear_engine_problems(config, spec, device))


def test_cpu_engines_take_what_their_kernels_have():
    assert problems() == []
    (problem,) = problems("model.dtype=float32")
    assert problem.startswith("model.dtype=float32") and "use bfloat16" in problem
    assert problems("model.dtype=float32", device=Device.cuda) == []
    odd = dataclasses.replace(SPEC.linear, key_head_dim=96, conv_width=3)
    narrow, short = problems(spec=dataclasses.replace(SPEC, linear=odd))
    assert "96 (keys) and 128 (values)" in narrow and "64 or 128" in narrow
    assert "linear_conv_kernel_dim=3" in short


def test_a_teachers_engines_need_the_same():
    """A teacher like Qwen3.5-9B, beside a policy in float32."""
    own = ("model.dtype=float32", "teacher.path=t", "teacher.cpu_kv_cache_gib=9")
    config = load([*GIVEN, *own])
    (problem,) = teacher._sizes(config, SPEC, Device.cpu)
    assert problem.startswith("teacher.dtype=float32") and "use bfloat16" in problem
    config.teacher.dtype = DType.bfloat16
    assert list(teacher._sizes(config, SPEC, Device.cpu)) == []


@pytest.mark.parametrize("device", Device)
def test_linear_attention_engine_refuses_untested_settings(device):
    if device is Device.auto:
        return
    (problem,) = problems("rollout.kv_cache_dtype=fp8", device=device)
    assert "rollout.kv_cache_dtype=fp8" in problem and "use auto" in problem
    found = problems("actor.routing_replay=engine", device=device)
    assert len(found) == (device is Device.cpu)


def test_a_cpu_engine_has_blocks_that_hold_a_state():
    """Qwen3.5-9B: 2.05 MiB of a state, blocks of 640 tokens, 24 of them for states."""
    state, token = SPEC.linear.state_bytes, 2 * 4 * 256 * 2
    assert state == 4 * 32 * 128 * 128 + 2 * 3 * 8192
    length = 128 * -(-state // (128 * token))
    assert length * token >= state > (length - 128) * token
    needed = (24 + 8 * 2) * length * token / 2**30
    assert list(cpu_cache_problem("key", needed + 1e-6, SPEC, 2 * length, 1, 2)) == []
    (problem,) = cpu_cache_problem("key", 0.99 * needed, SPEC, 2 * length, 1, 2)
    assert f"40 blocks x {length} tokens x {token:,} bytes" in problem


def test_layouts_that_the_planner_leaves_out():
    assert list(linear_layout_problems(SPEC, ranks=4, contexts=1)) == []
    context, gates = linear_layout_problems(SPEC, ranks=8, contexts=2)
    assert "actor.context_parallel=2" in context and "use at most 4" in gates
