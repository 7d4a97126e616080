import dataclasses
import math

import pytest
import torch

from rlmath.commands.plan.models import (
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    shared_expert_matrices,
)
from rlmath.model.fp8 import DTYPE, LARGEST, quantize, round_values
from rlmath.model.fp8_training import (
    Fp8Training,
    capability_problem,
    padded_tokens,
    rank_matrices,
    size_problems,
)
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

QWEN = model_spec(KNOWN["Qwen2.5-7B"])
MOE = model_spec(KNOWN["Qwen3-30B-A3B"])
BLOCKWISE, MXFP8 = Fp8Training("e4m3", "blockwise"), Fp8Training("e4m3", "mxfp8")


def elements(spec, layout, moe):
    return sum(one.count * math.prod(one.shape) for one in rank_matrices(spec, layout, moe))


def test_all_matrices_of_a_layer_are_there_and_split_over_ranks():
    """Against the counts that the plan's FLOPs are from."""
    biases = (QWEN.heads + 2 * QWEN.kv_heads) * QWEN.head_dim
    dense = attention_matrices(QWEN) - biases + feed_forward_matrices(QWEN)
    assert elements(QWEN, Layout(1, 1, 1), moe=False) == dense
    assert 4 * elements(QWEN, Layout(4, 1, 1), moe=False) == dense
    experts = MOE.experts * expert_matrices(MOE) + shared_expert_matrices(MOE)
    assert elements(MOE, Layout(1, 1, 1), moe=True) == attention_matrices(MOE) + experts
    shared = Layout(2, 1, 4, expert_parallel=8)
    assert elements(MOE, shared, moe=True) == attention_matrices(MOE) // 2 + experts // 8


def test_published_models_divide_and_the_arithmetic_is_shown_where_not():
    for recipe in (BLOCKWISE, MXFP8):
        assert not [*size_problems(QWEN, Layout(4, 1, 1), recipe)]
        assert not [*size_problems(MOE, Layout(2, 1, 4, expert_parallel=8), recipe)]
    odd = dataclasses.replace(QWEN, ffn=18944 + 32)
    assert not [*size_problems(odd, Layout(1, 1, 1), MXFP8)]
    assert not [*size_problems(odd, Layout(2, 1, 1), BLOCKWISE)]
    (message,) = size_problems(odd, Layout(2, 1, 1), MXFP8)
    assert "mlp.linear_fc2 has 18976 / 2 ranks = 9488 columns, which 32" in message
    found = " ".join(size_problems(odd, Layout(4, 1, 1), BLOCKWISE))
    assert "18976 / 4 ranks = 4744 columns, which 16" in found


def test_gathered_weights_have_complete_blocks():
    narrow = dataclasses.replace(QWEN, hidden=3584 + 64)
    assert not [*size_problems(narrow, Layout(1, 1, 1), BLOCKWISE)]
    (message,) = size_problems(narrow, Layout(2, 1, 1), BLOCKWISE)
    assert "hidden width is 3648, which 128" in message
    assert not [*size_problems(narrow, Layout(2, 1, 1), Fp8Training("e4m3", "tensorwise"))]


@pytest.mark.parametrize(
    ("recipe", "capability", "part"),
    [
        ("blockwise", (8, 0), "capability 9.0), and this one has 8.0"),
        ("tensorwise", (8, 9), "and this one has 8.9"),
        ("mxfp8", (8, 6), "and this one has 8.6"),
        ("mxfp8", (9, 0), "this one has 9.0; use blockwise"),
        ("mxfp8", (12, 0), "this one has 12.0; use blockwise"),
        ("mxfp8", (10, 0), None),
        ("blockwise", (9, 0), None),
        ("tensorwise", (10, 3), None),
    ],
)
def test_fp8_recipe_needs_compute_capability(recipe, capability, part):
    found = capability_problem(Fp8Training("hybrid", recipe), capability)
    assert found is None if part is None else part in (found or "")


def test_padded_tokens_are_multiples_of_a_block():
    assert padded_tokens(1000, None, Layout(4, 1, 1)) == 1000
    assert padded_tokens(1000, BLOCKWISE, Layout(4, 1, 1)) == 1024
    assert padded_tokens(1024, BLOCKWISE, Layout(4, 1, 1)) == 1024
    assert padded_tokens(1000, MXFP8, Layout(1, 1, 1)) == 1024
    assert padded_tokens(1000, Fp8Training("hybrid", "tensorwise"), Layout(1, 1, 1)) == 1008


TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_within_half_a_unit_and_repeat(dtype):
    torch.manual_seed(0)
    rows = torch.randn(64, 128).mul_(torch.logspace(-2, 3, 64)[:, None]).to(dtype)
    values, scale = quantize(rows)
    assert values.dtype == DTYPE and scale.shape == (64, 1)
    assert (values.float().abs().amax(1) == LARGEST).all()
    # Three bits of mantissa; below 2**-6 the numbers are 2**-9 apart.
    back = values.double() * scale.double()
    allowed = torch.maximum(rows.double().abs() * 2**-4, scale.double() * 2**-10) * 1.01
    assert ((back - rows.double()).abs() <= allowed).all()
    if dtype is torch.float32:
        again, _ = quantize(round_values(rows))
        assert (again.float() - values.float()).abs().max() <= 32  # One unit at the top.


def test_zeros_stay_zero():
    values, scale = quantize(torch.zeros(2, 8))
    assert not values.float().any() and scale.isfinite().all() and (scale > 0).all()
    assert not round_values(torch.zeros(2, 8)).any()
