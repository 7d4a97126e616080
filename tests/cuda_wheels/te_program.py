"""Builds the project's models with Transformer Engine's layers on meta tensors, for every preset.

usage: python -m tests.cuda_wheels.te_program layers
       python -m tests.cuda_wheels.te_program models JSON

JSON: a list of jobs, see ``test_te_models.py``.
"""

import json
import sys

import torch

from tests.cuda_wheels.forged import META, forge_gpus, forge_meta_device


def layers():
    """Transformer Engine's own layers, each alone."""
    import transformer_engine.pytorch as te

    common = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
    made = {
        "Linear": te.Linear(64, 64, **common),
        "LayerNormLinear": te.LayerNormLinear(64, 128, normalization="RMSNorm", **common),
        "GroupedLinear": te.GroupedLinear(4, 64, 64, **common),
        "DotProductAttention": te.DotProductAttention(
            4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal"
        ),
    }
    return {name: sum(p.numel() for p in one.parameters()) for name, one in made.items()}


def models(jobs):
    """Models that the actor builds for each job, from one process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlmath.model.parallel import Layout

    forge_meta_device()
    answers = []
    for job in jobs:
        world_size = Layout(**job["layout"]).world_size
        dist.init_process_group("fake", rank=job["rank"], world_size=world_size, store=FakeStore())
        answers.append(_build(job))
        from rlmath.actor.parallel import destroy

        destroy()
    return answers


def _build(job):
    from megatron.core import parallel_state, tensor_parallel

    from rlmath.actor.head import head_of
    from rlmath.actor.model import ModelSettings, build_model
    from rlmath.device import Platform
    from rlmath.model.parallel import Layout
    from rlmath.model.precision import Precision
    from rlmath.model.rank_layout import ParallelRank
    from rlmath.model.spec import model_spec
    from rlmath.weights.parameters import local_parameters

    layout = Layout(**job["layout"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    Platform.torch_device = property(lambda self: META)
    settings = ModelSettings(
        torch.bfloat16,
        sequence_parallel=job["sequence_parallel"],
        recompute=job["recompute"],
        recompute_num_layers=job["recompute_layers"],
        precision=Precision(**job["precision"]),
    )
    config = _transformers_config(job["config"])
    platform = Platform("cuda", "nccl", "transformer_engine")
    spec = model_spec(config.to_dict())
    model = build_model(spec, layout, platform, settings, job["tokens"])
    # Every parameter is in the weight tables, in the shape that they say: what loads, weight sync
    # and export go by.
    parameters = local_parameters([model], spec, ParallelRank.from_megatron())
    kinds = {}
    for module in model.modules():
        kind = f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
        kinds[kind] = kinds.get(kind, 0) + 1
    transformer = model.config
    return {
        "parameters": sum(one.tensor.numel() for one in parameters),
        "devices": sorted({one.tensor.device.type for one in parameters}),
        "kinds": kinds,
        "apply_rope_fusion": transformer.apply_rope_fusion,
        "bias_activation_fusion": transformer.bias_activation_fusion,
        "moe_grouped_gemm": transformer.moe_grouped_gemm,
        # None on stages without an output layer.
        "softmax": head.product.softmax.__name__ if (head := head_of(model)) else None,
    }


def _transformers_config(raw):
    import transformers

    name = raw["architectures"][0].removesuffix("ForCausalLM") + "Config"
    return getattr(transformers, name)(**raw)


def main():
    forge_gpus()
    if sys.argv[1] == "layers":
        print(json.dumps(layers()))
        return
    print(json.dumps(models(json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
