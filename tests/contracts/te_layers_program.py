"""Prints what Megatron builds of Transformer Engine's layers for the project's models, as JSON.

    python -m tests.contracts.te_layers_program stand_in|installed

``stand_in`` puts classes with Transformer Engine's names, parameters and constructor arguments in
its place, so that Megatron's own extension runs where there is no CUDA; ``installed`` takes the
real one, on meta tensors under the forged GPUs of ``tests/cuda_wheels/``.
"""

import dataclasses
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

# Dense with biases, normed queries and keys, experts, linear attention; layouts of several ranks.
CASES = {
    "dense": {"kind": "qwen2", "tp": 2, "world": 4},
    "tied": {"kind": "qwen2", "tp": 1, "world": 1, "tied": True},
    "qk_norm": {"kind": "qwen3", "tp": 2, "world": 4},
    "context": {"kind": "qwen2", "tp": 1, "cp": 2, "world": 4},
    "experts": {"kind": "qwen3_moe", "tp": 2, "ep": 2, "world": 4},
    "linear": {"kind": "qwen3_5", "tp": 2, "world": 4},
    "batch_invariant": {"kind": "qwen2", "tp": 2, "world": 4, "batch_invariant": True},
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def hf_config(kind, tied):
    """A ``transformers`` config of two small layers."""
    from transformers import Qwen2Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    if kind == "qwen2":
        return Qwen2Config(**SIZES, tie_word_embeddings=tied, architectures=["Qwen2ForCausalLM"])
    if kind == "qwen3":
        return Qwen3Config(**SIZES, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"])
    if kind == "qwen3_5":
        return Qwen3_5TextConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            tie_word_embeddings=tied,
            architectures=["Qwen3_5ForCausalLM"],
        )
    return Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=tied,
        architectures=["Qwen3MoeForCausalLM"],
    )


def describe(case, platform, dtype):
    """Classes by path, parameters' names and shapes, flags, and the fused gradients' layers."""
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlmath.actor.fusions import accumulate_into_main_grads
    from rlmath.actor.model import ModelSettings, build_model
    from rlmath.device.environment import rank_environment
    from rlmath.model.parallel import Layout
    from rlmath.model.precision import Precision
    from rlmath.model.spec import model_spec

    # A rank has models of one kind; Megatron writes the attention's into the environment.
    for name in ("FLASH", "FUSED", "UNFUSED"):
        os.environ.pop(f"NVTE_{name}_ATTN", None)
    tp, cp, ep = case.get("tp", 1), case.get("cp", 1), case.get("ep", 1)
    dist.init_process_group("fake", rank=0, world_size=case["world"], store=FakeStore())
    layout = Layout(tp, 1, case["world"] // tp // cp, context_parallel=cp, expert_parallel=ep)
    parallel_state.initialize_model_parallel(
        tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    precision = Precision(batch_invariant=case.get("batch_invariant", False))
    os.environ |= rank_environment(
        "cuda", num_threads=1, layout=layout, batch_invariant=precision.batch_invariant
    )
    settings = ModelSettings(dtype, sequence_parallel=tp > 1, precision=precision)
    spec = model_spec(hf_config(case["kind"], case.get("tied", False)).to_dict())
    try:
        model = build_model(spec, layout, platform, settings, 256)
        told = accumulate_into_main_grads(model)
        layer = model.decoder.layers[0]
        fused = {
            name: module.fuse_wgrad_accumulation
            for name, module in model.named_modules()
            if hasattr(module, "fuse_wgrad_accumulation")
        }
        config = {
            field.name: str(value)
            for field in dataclasses.fields(model.config)
            if (value := getattr(model.config, field.name)) is not None
        }
        attention = model.decoder.layers[-1].self_attention.core_attention
        return {
            "modules": {name: type(module).__name__ for name, module in layer.named_modules()},
            "final_norm": type(model.decoder.final_layernorm).__name__,
            "output": type(model.output_layer).__name__,
            "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
            "sequence_parallel": sorted(
                name
                for name, p in model.named_parameters()
                if getattr(p, "sequence_parallel", False)
            ),
            "split": sorted(
                name
                for name, p in model.named_parameters()
                if getattr(p, "tensor_model_parallel", False)
            ),
            "told": told,
            "fused": fused,
            "config": config,
            "context_ranks": 1 if attention.cp_group is None else attention.cp_group.size(),
            "num_splits": attention.num_splits,
            "flash_alone": os.environ["NVTE_FUSED_ATTN"] == "0",
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def with_stand_in():
    """A CPU that Megatron takes for one with Transformer Engine."""
    from tests.contracts.te_stand_in import install

    install()
    from rlmath.device import CPU, Platform

    CPU.prepare_megatron_process(0, 1)
    # Its kernels are Triton's; what they replace is looked at in tests/cuda_wheels/.
    import rlmath.actor.model as model

    model.enable_batch_invariance = lambda: None
    return Platform("cpu", "gloo", "transformer_engine"), torch.float32


def with_installed():
    """Forged GPUs, whose tensors are meta tensors."""
    from tests.cuda_wheels import forged

    forged.forge_gpus()
    import transformer_engine.pytorch.ops.basic.rmsnorm as rmsnorm

    forged.forge_meta_device()
    # It asks for "cuda" and the index of a device.
    rmsnorm.canonicalize_device = lambda _: forged.META
    import rlmath.actor.model as model
    from rlmath.device import Platform

    model.enable_batch_invariance = lambda: None
    Platform.torch_device = property(lambda _: forged.META)
    return Platform("cuda", "nccl", "transformer_engine"), torch.bfloat16


def main(which):
    """Describes every case, or says what went wrong with it."""
    platform, dtype = with_stand_in() if which == "stand_in" else with_installed()
    nn.Module.cuda = lambda self, *_, **__: self
    found = {name: describe(case, platform, dtype) for name, case in CASES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
