"""Results that ``te_layers_program`` has to find, with Transformer Engine or with its fake."""

_DENSE = {
    "input_layernorm": "IdentityOp",
    "self_attention.linear_qkv": "TELayerNormColumnParallelLinear",
    "self_attention.core_attention": "TEDotProductAttention",
    "self_attention.linear_proj": "TERowParallelLinear",
    "self_attention.q_layernorm": "IdentityOp",
    "pre_mlp_layernorm": "IdentityOp",
    "mlp.linear_fc1": "TELayerNormColumnParallelLinear",
    "mlp.linear_fc2": "TERowParallelLinear",
}
_NORMED = {"self_attention.q_layernorm": "RMSNorm", "self_attention.k_layernorm": "RMSNorm"}
MODULES = {
    "dense": _DENSE,
    "tied": _DENSE,
    "context": _DENSE,
    "qk_norm": _DENSE | _NORMED,
    "experts": {name: kind for name, kind in _DENSE.items() if not name.startswith("mlp")}
    | _NORMED
    | {
        "pre_mlp_layernorm": "RMSNorm",
        "mlp.router": "TopKRouter",
        # All experts of a rank in one grouped product.
        "mlp.experts": "TEGroupedMLP",
        "mlp.experts.linear_fc1": "TEColumnParallelGroupedLinear",
        "mlp.experts.linear_fc2": "TERowParallelGroupedLinear",
    },
    # The first layer's; the other has attention.
    "linear": {
        "input_layernorm": "RMSNorm",
        "self_attention": "PackedDeltaNet",
        "self_attention.in_proj": "TEColumnParallelLinear",
        "self_attention.out_norm": "GatedNorm",
        "self_attention.out_proj": "TERowParallelLinear",
        "pre_mlp_layernorm": "IdentityOp",
        "mlp.linear_fc1": "TELayerNormColumnParallelLinear",
    },
    # Separate norms: the kernel inside the fused module depends on the number of rows.
    "batch_invariant": _DENSE
    | {
        "input_layernorm": "RMSNorm",
        "self_attention.linear_qkv": "TEColumnParallelLinear",
        "pre_mlp_layernorm": "RMSNorm",
        "mlp.linear_fc1": "TEColumnParallelLinear",
    },
}
SUMMED = {"decoder.layers.0.self_attention.out_norm.weight"}
FLAGS = {
    "apply_rope_fusion": "True",
    "bias_activation_fusion": "True",
    "gradient_accumulation_fusion": "False",
    "moe_permute_fusion": "True",
    "moe_router_fusion": "False",
    "bias_dropout_fusion": "False",
    "masked_softmax_fusion": "False",
    "persist_layer_norm": "False",
    "cross_entropy_loss_fusion": "False",
    "tp_comm_overlap": "False",
}


def check(case, found, *, marks):
    """Asserts what one case's description has to say.

    Args:
        marks: Whether parameters still carry what was set on them; meta tensors that replace
            others do not.
    """
    assert MODULES[case].items() <= found["modules"].items()
    assert found["final_norm"] == "RMSNorm"
    assert FLAGS.items() <= found["config"].items()
    invariant = case == "batch_invariant"
    # Two layers of four products each; the output layer is Megatron's, with another flag.
    assert found["output"] == "ColumnParallelLinear" and "output_layer" not in found["fused"]
    assert found["told"] == (0 if invariant else 8) and len(found["fused"]) == 8
    assert set(found["fused"].values()) == {not invariant}
    assert found["context_ranks"] == (2 if case == "context" else 1)
    # Under batch invariance one kernel reads each sequence's keys, whatever its length.
    assert found["flash_alone"] == invariant and (found["num_splits"] == 1) == invariant
    assert found["config"]["deterministic_mode"] == str(invariant)
    _names(case, found, marks)


def _names(case, found, marks):
    """Parameters have the names that weights are loaded and sent by."""
    from rlmath.model.families import When
    from rlmath.model.spec import model_spec
    from rlmath.weights.pieces import walk
    from tests.contracts.te_layers_program import CASES, hf_config

    of = CASES[case]
    spec = model_spec(hf_config(of["kind"], of.get("tied", False)).to_dict())
    known = set()
    here = spec.experts // of.get("ep", 1)
    for entry, layer, expert in walk(spec):
        if entry.when is When.tied or (expert is not None and expert >= here):
            continue
        names = {name.format(layer=layer, expert=expert) for name in entry.megatron}
        present = names & set(found["parameters"])
        assert len(present) == 1, names
        known |= present
    assert known == set(found["parameters"])
    if marks and of.get("tp", 1) > 1:
        # Their gradients differ between tensor ranks and are summed by this mark.
        # Linear attention's norm sums its own.
        norms = {name for name in known - SUMMED if "norm" in name or "router" in name}
        assert norms == set(found["sequence_parallel"])
