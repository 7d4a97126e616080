"""Transformer Engine's FP8 on meta tensors: its context around a stage's layers, and the bytes of
what its quantizers make. Nothing is quantized: that takes a GPU.

usage: python -m tests.cuda_wheels.fp8_wheel_program context RECIPE RECOMPUTE
       python -m tests.cuda_wheels.fp8_wheel_program bytes JSON

JSON: shapes by name.
"""

import json
import os
import sys

import torch
import torch._dynamo

from tests.cuda_wheels.forged import META, forge_gpus, forge_meta_device

TOKENS = 256


def quantizers(recipe):
    """Quantizers of weights and of activations, for both directions."""
    import transformer_engine.pytorch  # noqa: F401  It loads the extension, which is on no path.
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    e4m3 = tex.DType.kFloat8E4M3
    both = {"rowwise": True, "columnwise": True}
    if recipe == "blockwise":
        return {
            name: Float8BlockQuantizer(e4m3, block_scaling_dim=dims, **both)
            for name, dims in (("weight", 2), ("activation", 1))
        }
    if recipe == "mxfp8":
        return dict.fromkeys(("weight", "activation"), MXFP8Quantizer(e4m3, **both))
    made = Float8CurrentScalingQuantizer(e4m3, device=META, **both)
    return dict.fromkeys(("weight", "activation"), made)


def num_bytes(shapes):
    """By recipe and name: of a tensor as it is, and of its transpose."""
    parts = {
        "rows": ("_rowwise_data", "_rowwise_scale_inv", "_data"),
        "columns": ("_columnwise_data", "_columnwise_scale_inv", "_transpose"),
    }
    found = {}
    for recipe in ("blockwise", "mxfp8", "tensorwise"):
        made = quantizers(recipe)
        found[recipe] = {}
        for name, shape in shapes.items():
            kind = "activation" if name.startswith("input") else "weight"
            tensor = made[kind].make_empty(tuple(shape), dtype=torch.bfloat16, device=META)
            found[recipe][name] = {
                part: sum(
                    value.untyped_storage().nbytes()
                    for attribute in attributes
                    if isinstance(value := getattr(tensor, attribute, None), torch.Tensor)
                )
                for part, attributes in parts.items()
            }
    return found


def context(recipe, recompute):
    """FP8 context of each product of a stage in a pass, with and without gradients."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlmath.model.parallel import Layout

    forge_meta_device()
    # SwiGLU is compiled on a GPU.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    torch.nn.Module.cuda = lambda self, *_, **__: self
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    layout = Layout(2, 1, 2)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return _passes(layout, recipe, recompute)


def _passes(layout, recipe, recompute):
    from megatron.core.packed_seq_params import PackedSeqParams

    from rlmath.actor.fp8 import prepare_for_fp8, without_fp8
    from rlmath.actor.model import ModelSettings, build_model
    from rlmath.device import Platform
    from rlmath.model.fp8_training import Fp8Training
    from rlmath.model.published import KNOWN
    from rlmath.model.spec import model_spec

    Platform.torch_device = property(lambda _: META)
    config = dict(KNOWN["Qwen2.5-1.5B"], num_hidden_layers=2)
    settings = ModelSettings(
        torch.bfloat16,
        sequence_parallel=True,
        recompute=recompute,
        fp8=Fp8Training("hybrid", recipe),
    )
    platform = Platform("cuda", "nccl", "transformer_engine")
    model = build_model(model_spec(config), layout, platform, settings, TOKENS)
    seen = _watch()
    prepare_for_fp8([model])
    ends = torch.zeros(3, dtype=torch.int32, device=META)
    sequences = PackedSeqParams(
        "thd", ends, ends, max_seqlen_q=TOKENS // 2, max_seqlen_kv=TOKENS // 2
    )
    row = torch.zeros(1, TOKENS, dtype=torch.int64, device=META)

    def one_pass(training):
        model.train(training)
        model.set_is_first_microbatch()  # As the schedule does.
        seen.clear()
        with torch.set_grad_enabled(training):
            model(row, row, None, packed_seq_params=sequences)
        return [list(one) for one in dict.fromkeys(map(tuple, seen))] + [len(seen)]

    found = {
        "dtypes": sorted({str(one.dtype) for one in model.parameters()}),
        "training": one_pass(True),
        "log-probs": one_pass(False),
    }
    with without_fp8(model):
        found["without"] = one_pass(False)
    return found


def _watch():
    """Let Transformer Engine's layers say what they see, and compute nothing."""
    import megatron.core.transformer.attention as attention
    import transformer_engine.pytorch as te
    import transformer_engine.pytorch.distributed as recomputation
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    seen = []

    def multiply(self, x, is_first_microbatch=None, **_):
        recipe = type(State.get_fp8_recipe()).__name__ if State.is_fp8_enabled() else None
        dpa = State.get_fp8_recipe().fp8_dpa if recipe else None
        split = self.tp_size if self.sequence_parallel else 1
        rows = x.size(0)
        if self.parallel_mode == "column":
            rows *= split
        elif self.parallel_mode == "row":
            rows //= split
        seen.append((type(self).__mro__[1].__name__, recipe, dpa, is_first_microbatch, x.size(0)))
        out = x.new_empty(rows, x.size(1), self.weight.size(0))
        out = out + x.sum() * 0
        return (out, None) if self.return_bias else out

    for layer in (te.Linear, te.LayerNormLinear):
        layer.forward = multiply
    # A layer that is recomputed keeps the random state of a GPU.
    recomputation._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    te.DotProductAttention.forward = lambda self, q, *_, **__: q.flatten(-2)
    te.RMSNorm.forward = lambda self, x: x
    attention.apply_rotary_pos_emb = lambda t, *_, **__: t
    return seen


def main():
    forge_gpus()
    if sys.argv[1] == "bytes":
        print(json.dumps(num_bytes(json.loads(sys.argv[2]))))
    else:
        print(json.dumps(context(*sys.argv[2:])))


if __name__ == "__main__":
    main()
