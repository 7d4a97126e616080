"""Engines of models with linear attention: what is refused, and the memory of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from rlmath.checks import teacher
from rlmath.checks.layout import cpu_cache_problem
from rlmath.checks.linear_attention import linear_engine_problems, linear_layout_problems
from rlmath.config.load import load
from rlmath.config.schema import Device, DType
from rlmath.model.published import published_spec
from rlmath.model.spec import ModelSpec

SPEC = published_spec("Qwen3.5-9B")
assert SPEC is not None


def problems(*settings: str, spec: ModelSpec = SPEC, device: Device = Device.cpu) -> Sequence[str]:
    config = load(
        [
            "model.path=m",
            "data.train_paths=[d]",
            "runner.run_dir=r",
            "model.dtype=bfloat16",
            *settings,
        ]
    )
    return list(linear_engine_problems(config, spec, device))


def test_cpu_engines_take_what_their_kernels_have() -> None:
    assert problems() == []
    (problem,) = problems("model.dtype=float32")
    assert problem.startswith("model.dtype=float32") and "use bfloat16" in problem
    assert problems("model.dtype=float32", device=Device.cuda) == []
    linear = SPEC.linear
    assert linear is not None
    odd = dataclasses.replace(linear, key_head_dim=96, conv_width=3)
    narrow, short = problems(spec=dataclasses.replace(SPEC, linear=odd))
    assert "96 (keys) and 128 (values)" in narrow and "64 or 128" in narrow
    assert "linear_conv_kernel_dim=3" in short


def test_a_teachers_engines_need_the_same() -> None:
    """A teacher like Qwen3.5-9B, beside a policy in float32."""
    config = load(
        [
            "model.path=m",
            "data.train_paths=[d]",
            "runner.run_dir=r",
            "model.dtype=float32",
            "teacher.path=t",
            "teacher.cpu_kv_cache_gib=9",
        ]
    )
    (problem,) = teacher._sizes(config, SPEC, Device.cpu)
    assert problem.startswith("teacher.dtype=float32") and "use bfloat16" in problem
    config.teacher.dtype = DType.bfloat16
    assert list(teacher._sizes(config, SPEC, Device.cpu)) == []


@pytest.mark.parametrize("device", Device)
def test_linear_attention_engine_refuses_untested_settings(device: Device) -> None:
    if device is Device.auto:
        return
    (problem,) = problems("rollout.kv_cache_dtype=fp8", device=device)
    assert "rollout.kv_cache_dtype=fp8" in problem and "use auto" in problem
    found = problems("actor.routing_replay=engine", device=device)
    assert len(found) == (device is Device.cpu)


def test_a_cpu_engine_has_blocks_that_hold_a_state() -> None:
    """Qwen3.5-9B: 2.05 MiB of a state, blocks of 640 tokens, 24 of them for states."""
    linear = SPEC.linear
    assert linear is not None
    state, token = linear.state_bytes, 2 * 4 * 256 * 2
    assert state == 4 * 32 * 128 * 128 + 2 * 3 * 8192
    length = 128 * -(-state // (128 * token))
    assert length * token >= state > (length - 128) * token
    needed = (24 + 8 * 2) * length * token / 2**30
    assert list(cpu_cache_problem("key", needed + 1e-6, SPEC, 2 * length, 1, 2)) == []
    (problem,) = cpu_cache_problem("key", 0.99 * needed, SPEC, 2 * length, 1, 2)
    assert f"40 blocks x {length} tokens x {token:,} bytes" in problem


def test_layouts_that_the_planner_leaves_out() -> None:
    assert list(linear_layout_problems(SPEC, ranks=4, contexts=1)) == []
    context, gates = linear_layout_problems(SPEC, ranks=8, contexts=2)
    assert "actor.context_parallel=2" in context and "use at most 4" in gates
