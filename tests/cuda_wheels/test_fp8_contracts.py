"""Source of Transformer Engine that ``actor.fp8`` relies on; each says what breaks when it goes.

``tests/contracts/te_stand_in_fp8.py`` copies these rules for the plain suite.
"""

import ast

import pytest

from tests.contracts.contract import Row, check, parametrize
from tests.cuda_wheels.test_te_layers import function, source

TE = "transformer_engine.pytorch"
COPIES = "copies of weights live for one run of the schedule (rlmath/actor/fp8.py)"

ROWS = [
    Row(
        f"{TE}.module.base:TransformerEngineBaseModule.get_weight_workspace",
        COPIES,
        takes=("tensor", "quantizer", "cache_name", "update_workspace"),
        says=(
            "out = self._fp8_workspaces.get(cache_name, None)",
            "self._fp8_workspaces[cache_name] = out",
        ),
    ),
    Row(
        f"{TE}.utils:assert_dim_for_fp8_exec",
        "sizes that are refused (rlmath/model/fp8_training.py)",
        says=("% 8 == 0", "% 16 == 0"),
    ),
    Row(
        f"{TE}.utils:assert_dim_for_all_gather",
        "tokens of a tensor rank are padded to whole blocks (rlmath/model/fp8_training.py)",
        says=("quantizer.is_quantizable(tensor)",),
    ),
    Row(
        f"{TE}.tensor.float8_blockwise_tensor:Float8BlockQuantizer",
        "blocks of 128 (rlmath/model/fp8_training.py)",
        says=("self.block_len = 128", "inp.shape[-1] % self.block_len != 0"),
    ),
    Row(
        f"{TE}.tensor.mxfp8_tensor:MXFP8Quantizer.make_empty",
        "multiples of 32 (rlmath/model/fp8_training.py)",
        says=("shape[-1] % MXFP8_BLOCK_SCALING_SIZE == 0",),
    ),
    Row(
        f"{TE}.quantization:check_fp8_block_scaling_support",
        "GPUs and CUDA that are refused (rlmath/device/fp8.py)",
        says=("(9, 0)", "12.9"),
    ),
    Row(
        f"{TE}.quantization:check_mxfp8_support",
        "GPUs that are refused (rlmath/model/fp8_training.py)",
        says=("(10, 0)", "(12, 0)"),
    ),
    Row(
        f"{TE}.quantization:get_align_size_for_quantization",
        "sizes that are refused (rlmath/model/fp8_training.py)",
        says=("return 32", "return 16"),
    ),
    Row(
        "transformer_engine.common.recipe:Float8BlockScaling",
        "a token's scales are its own, a weight's are of 128 x 128 (rlmath/commands/plan/fp8.py)",
        says=("x_block_scaling_dim: int = 1", "w_block_scaling_dim: int = 2"),
    ),
    Row(
        f"{TE}.quantization:FP8GlobalStateManager.autocast_exit",
        "actor.fp8_recipe=delayed is not offered: passes move its scales",
        says=("cls.reduce_and_update_fp8_tensors(forward=True)",),
    ),
    Row(
        f"{TE}.module.base:TransformerEngineBaseModule.get_extra_state",
        "checkpoints may leave extra state out (rlmath/checkpoint/state.py)",
        says=('if state["recipe"].delayed():',),
    ),
]


@parametrize(ROWS)
def test_fp8_row_of_transformer_engine_holds(row):
    check(row)


@pytest.mark.parametrize("module", ["linear", "layernorm_linear", "grouped_linear"])
def test_a_first_micro_batch_overwrites_and_others_use_the_copy_that_there_is(module):
    """Nobody needs to say that a micro-batch is a first one."""
    text = source(f"module/{module}")
    assert "ctx.fuse_wgrad_accumulation and not ctx.is_first_microbatch" in text
    assert "update_workspace = is_first_microbatch is None or is_first_microbatch" in text
    assert "None if is_first_microbatch is None else" in text


def test_a_blockwise_copy_without_its_transpose_would_be_kept():
    """A pass without gradients leaves one; per tensor and MXFP8 it is made again."""
    found = function("module/base", "TransformerEngineBaseModule", "get_weight_workspace")
    text = ast.unparse(found)
    assert "isinstance(out, MXFP8TensorStorage)" in text
    assert "Float8BlockwiseQTensorStorage" not in text
    # A recomputed layer's transpose is made of the copy, as weights are in squares.
    usage = function(
        "tensor/storage/float8_blockwise_tensor_storage",
        "Float8BlockwiseQTensorStorage",
        "update_usage",
    )
    assert "self._create_columnwise()" in ast.unparse(usage)


def test_recomputation_is_in_the_context_of_the_forward_pass():
    text = ast.unparse(function("distributed", "_CheckpointFunction", "backward"))
    assert "autocast(enabled=ctx.fp8, recipe=ctx.fp8_recipe)" in text


def test_a_frozen_matrix_keeps_no_input():
    text = ast.unparse(function("module/linear", "_Linear", "forward"))
    assert "backward_needs_input = is_grad_enabled and weight.requires_grad" in text
    assert "saved_inputmat = inputmat" in text and "inputmat = inp" in text
