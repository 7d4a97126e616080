from types import SimpleNamespace
from typing import Any

import pytest

from tests.contracts.te_expected import MODULES, check
from tests.contracts.te_fp8_program import MICRO_BATCHES, RECOMPUTE
from tests.support.program_answers import answer_of


@pytest.fixture(scope="module")
def models():
    """In a separate process: Megatron looks for Transformer Engine when it is imported."""
    return answer_of("tests.contracts.te_layers_program", "stand_in")


@pytest.mark.parametrize("case", MODULES)
def test_layers_are_transformer_engines(models, case):
    check(case, models[case], marks=True)


PRODUCTS = 4 * 2 * MICRO_BATCHES  # Of the matrices of two layers.
# Products that a backward pass repeats: all of the two layers, or those of their MLPs.
AGAIN = {"none": 0, "full": PRODUCTS, "selective": PRODUCTS // 2}


def test_alignment_is_megatrons():
    """The padding of experts, which is Megatron's, is enough for a recipe's products."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    from rlmath.config.actor import Fp8Recipe as Offered
    from rlmath.model.fp8_training import SIZE_MULTIPLES

    assert {one.value for one in Offered} == set(SIZE_MULTIPLES)
    for name, multiple in SIZE_MULTIPLES.items():
        assert get_fp8_align_size(Fp8Recipe[name]) == multiple


def test_no_micro_batch_is_a_first_one():
    """By Megatron's own method, which its schedule calls."""
    from megatron.core.transformer.module import MegatronModule
    from torch import nn

    from rlmath.actor.fp8 import prepare_for_fp8

    class Model(MegatronModule):
        def __init__(self):
            super().__init__(SimpleNamespace(fp8="hybrid", fp4=None))
            self.layer: Any = nn.Linear(1, 1)
            self.layer.is_first_microbatch = False

    usual, prepared = Model(), Model()
    prepare_for_fp8([prepared])
    for model in (usual, prepared):
        model.set_is_first_microbatch()
    assert usual.layer.is_first_microbatch and not prepared.layer.is_first_microbatch


@pytest.fixture(scope="module")
def passes():
    """In a separate process: Megatron looks for Transformer Engine when it is imported."""
    return answer_of("tests.contracts.te_fp8_program")


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_all_products_of_layers_are_in_fp8_and_nothing_else_is(passes, recompute):
    found = passes[recompute]
    # Recipe, first micro-batch, tokens (padded to whole blocks), and how often.
    assert found["forward"] == [["Float8BlockScaling", False, 128, PRODUCTS]]
    again = PRODUCTS + AGAIN[recompute]
    assert found["backward"] == [["Float8BlockScaling", False, 128, again]]
    assert set(found["quantizing"]) == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert found["config"] == {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    assert found["dtypes"] == ["torch.bfloat16"] and found["fp8_param"] is False


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_copies_of_weights_are_those_of_the_pass(passes, recompute):
    found = passes[recompute]
    assert not found["stale"], "a pass after an optimizer step used the weights before it"
    assert found["copies after forward"] == found["copies after backward"] == 0
    assert found["again"], "a pass without gradients changed what the next one gives"
    assert found["gradient"], "the backward pass left no gradient"


def test_the_gate_compares_with_a_pass_without_fp8(passes):
    """Its noise is as large as what FP8 does."""
    assert passes["none"]["without"] == [[None, False, 128, PRODUCTS]]
    assert passes["none"]["moved by FP8"] > 1e-3
