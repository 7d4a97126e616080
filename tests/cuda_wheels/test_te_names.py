"""Names of Transformer Engine that Megatron and the project use are in the installed version."""

import ast

import pytest

from tests.contracts import contract
from tests.contracts.contract import Row, check, parametrize
from tests.contracts.imports import imported_names

# Megatron's modules that a rank with Transformer Engine's layers runs.
USERS = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.extensions.transformer_engine_spec_provider",
    "megatron.core.fusions.fused_cross_entropy",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.transformer_block",
)
# Not in this version; Megatron has an ``except ImportError`` around each, and works without them.
OPTIONAL = {
    ("transformer_engine.pytorch.attention", "apply_rotary_pos_emb"): "its older place",
    ("transformer_engine.pytorch.attention", "_SplitAlongDim"): (
        "in no Transformer Engine 2: torch.split instead, whose backward pass copies"
    ),
    ("transformer_engine.pytorch.module.base", "get_workspace"): (
        "the router's product in float32 is torch.mm of float32 copies instead"
    ),
}


def _names():
    found = []
    for user in USERS:
        tree = contract.tree_of(user)
        assert tree is not None, user
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "transformer_engine"
            ):
                found += [(user, node.module or "", alias.name) for alias in node.names]
    return sorted(set(found))


NAMES = _names()


@pytest.mark.parametrize(("user", "module", "name"), NAMES)
def test_te_names_that_megatron_imports_exist(user, module, name):
    assert contract.reachable(module, name) == ((module, name) not in OPTIONAL)


def test_te_names_that_the_project_imports_exist():
    names = imported_names(("transformer_engine",))
    assert names
    for module, name in names:
        assert contract.reachable(module, name), (module, name, names[module, name])


def test_megatron_takes_transformer_engines_kernels():
    """Not its own, slower ones, which it falls back to without a word."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils

    assert rope_utils.fused_apply_rotary_pos_emb_thd is not None
    assert clip_grads.multi_tensor_applier.__module__.startswith("transformer_engine")
    # The exception: see OPTIONAL. With it the router multiplies without float32 copies.
    assert moe_utils.te_general_gemm is None
    from megatron.core import optimizer

    assert optimizer.Adam.__module__.startswith("transformer_engine")


TE = "transformer_engine.pytorch"
ROWS = [
    Row(
        f"{TE}:Linear",
        "tensor-parallel projections (Megatron's TERowParallelLinear)",
        takes=("in_features", "out_features", "params_dtype", "parallel_mode", "tp_group"),
    ),
    Row(
        f"{TE}:LayerNormLinear",
        "projections with a fused norm (Megatron's TELayerNormColumnParallelLinear)",
        takes=("normalization", "zero_centered_gamma", "params_dtype", "return_layernorm_output"),
    ),
    Row(
        f"{TE}:GroupedLinear",
        "experts multiplied at once (Megatron's TEGroupedMLP)",
        takes=("num_gemms", "in_features", "out_features", "params_dtype"),
    ),
    Row(
        f"{TE}:GroupedLinear.set_tensor_parallel_attributes",
        "the norm of the gradient counts experts of the first tensor rank alone "
        "(Megatron-LM#5916, docs/correctness.md)",
        says=("is_parallel=True",),
    ),
    Row(
        f"{TE}:DotProductAttention.forward",
        "attention of packed sequences and context-parallel attention",
        takes=("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "attn_mask_type"),
    ),
    Row(
        f"{TE}:DotProductAttention",
        "attention of packed sequences and context-parallel attention",
        takes=("num_gqa_groups", "qkv_format", "attn_mask_type", "cp_group", "cp_comm_type"),
    ),
    Row(
        f"{TE}.optimizers:FusedAdam",
        "Adam's states in a checkpoint: its step stands in the parameter group "
        "(rlmath/checkpoint/optimizer_state.py)",
        takes=("lr", "betas", "eps", "weight_decay", "adam_w_mode"),
        says=('group["step"]',),
    ),
    Row(
        f"{TE}.optimizers:FusedAdam.load_state_dict",
        "a load no longer makes the moments again, and Megatron's own would do "
        "(rlmath/checkpoint/optimizer_state.py)",
        says=("self.state[param] = {}",),
    ),
]


@parametrize(ROWS)
def test_transformer_engine_row_holds(row):
    check(row)
