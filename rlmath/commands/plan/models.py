"""The model of a plan: a published one by name, a folder's config.json, or sizes one by one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from rlmath.config.load import load, options
from rlmath.errors import UserError
from rlmath.model.families import Rule, When
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, model_spec, padded_vocab_size, read_model_spec

# Layers, hidden, feed-forward, heads, key-value heads, vocabulary, tied, positions: as the
# config.json of each says. The tests hold the parameter counts that they are published with.
_QWEN2 = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151936, True, 32768),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True, 131072),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True, 32768),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False, 131072),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, 152064, False, 131072),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, 152064, False, 131072),
    "Qwen2.5-72B": (80, 8192, 29568, 64, 8, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-1.5B": (28, 1536, 8960, 12, 2, 151936, False, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": (28, 3584, 18944, 28, 4, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-14B": (48, 5120, 13824, 40, 8, 152064, False, 131072),
    "DeepSeek-R1-Distill-Qwen-32B": (64, 5120, 27648, 40, 8, 152064, False, 131072),
}
# Qwen3's heads are 128 wide whatever the hidden size.
_QWEN3 = {
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 151936, True, 40960),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 151936, True, 40960),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, 151936, True, 40960),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, 151936, False, 40960),
    "Qwen3-14B": (40, 5120, 17408, 40, 8, 151936, False, 40960),
    "Qwen3-32B": (64, 5120, 25600, 64, 8, 151936, False, 40960),
}
_LLAMA = {
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 128256, True, 131072),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128256, False, 131072),
    "Llama-3.1-70B": (80, 8192, 28672, 64, 8, 128256, False, 131072),
}
# Eight of 128 experts of width 768 for each token.
_QWEN3_MOE = {"Qwen3-30B-A3B": (48, 2048, 6144, 32, 4, 151936, False, 40960)}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_ORDER = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)


def _config(architecture: str, sizes: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **dict(zip(_ORDER, sizes, strict=True)), **more}


KNOWN: dict[str, dict[str, Any]] = {
    **{name: _config("Qwen2ForCausalLM", sizes) for name, sizes in _QWEN2.items()},
    **{name: _config("Qwen3ForCausalLM", sizes, head_dim=128) for name, sizes in _QWEN3.items()},
    **{
        name: _config("Qwen3MoeForCausalLM", sizes, head_dim=128, **_EXPERTS)
        for name, sizes in _QWEN3_MOE.items()
    },
    **{name: _config("LlamaForCausalLM", sizes) for name, sizes in _LLAMA.items()},
}

# Flags that give the sizes without a file, and the field of config.json that each stands for.
SHAPE_FLAGS = {
    "--layers": "num_hidden_layers",
    "--hidden": "hidden_size",
    "--ffn": "intermediate_size",
    "--heads": "num_attention_heads",
    "--kv-heads": "num_key_value_heads",
    "--vocab": "vocab_size",
}


def read_plan_model(arguments: argparse.Namespace, model: str | None) -> tuple[str, ModelSpec]:
    """Name or path, and spec, of the model that the command line asks for.

    Args:
        arguments: With the sizes.
        model: ``model.path``, where it is given.

    Raises:
        UserError: There is no such model, a size is missing, or the actor has no such architecture.
    """
    given = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in SHAPE_FLAGS}
    if model is None:
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            raise UserError(
                "rlmath plan layout: give model.path (a name, a folder or its config.json), or all "
                f"of its sizes; missing: {', '.join(missing)}"
            )
        config: dict[str, Any] = {SHAPE_FLAGS[flag]: value for flag, value in given.items()}
        config |= {
            "architectures": [arguments.architecture],
            "tie_word_embeddings": arguments.tied,
            "head_dim": arguments.head_dim,
            "max_position_embeddings": 2**20,
        }
        return "PATH", model_spec(config, "the model of these sizes")
    flags = [flag for flag, value in given.items() if value is not None]
    if flags:
        raise UserError(f"{', '.join(flags)}: the sizes are those of {model}; give one")
    return read_named_model(model)


def read_named_model(name: str) -> tuple[str, ModelSpec]:
    """Name or path, and spec, of a published model, a preset, a folder or its config.json.

    Raises:
        UserError: There is no such model, or the actor has no such architecture.
    """
    path = Path(name)
    if path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return str(path), read_model_spec(path)
    known = {key.lower(): key for key in KNOWN}
    if name in options("model"):  # A file of conf/model says whose folder it is for.
        name = load([f"model={name}", "runner.run_dir=runs/plan"]).model.path
    short = name.rsplit("/", 1)[-1].lower()
    if short not in known:
        raise UserError(
            f"{name}: no folder with a config.json, and no model that is known by name; known are "
            f"{', '.join(KNOWN)}, and model={', model='.join(options('model'))}"
        )
    return f"models/{known[short]}", model_spec(KNOWN[known[short]], name)


def attention_matrices(spec: ModelSpec) -> int:
    """Weights of a layer's attention that tensor ranks share: matrices and their biases."""
    query, both = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    bias = query + both if spec.family.qkv_bias else 0
    return spec.hidden * (query + both) + query * spec.hidden + bias


def feed_forward_matrices(spec: ModelSpec) -> int:
    """Weights of a dense layer's feed-forward."""
    return 3 * spec.hidden * spec.ffn


def expert_matrices(spec: ModelSpec) -> int:
    """Weights of one expert."""
    return 3 * spec.hidden * spec.moe_ffn


def layer_norms(spec: ModelSpec) -> int:
    """Weights of one layer that every tensor rank holds."""
    one = (
        math.prod(map(spec.size, tensor.dims))
        for entry in spec.family.entries
        if entry.per_layer and entry.when is not When.moe_layer and spec.has(entry, 0)
        for tensor in entry.hf
        if len(tensor.dims) == 1 and entry.rule is not Rule.qkv
    )
    return sum(one)


def shared_matrices(spec: ModelSpec) -> int:
    """Matrices of all layers that tensor ranks share; experts apart."""
    dense = spec.layers - spec.moe_layers
    return spec.layers * attention_matrices(spec) + dense * feed_forward_matrices(spec)


def active_matrices(spec: ModelSpec) -> int:
    """Matrices of all layers that one token meets: of experts those that it is sent to."""
    experts = spec.experts_per_token * expert_matrices(spec) + spec.experts * spec.hidden
    return shared_matrices(spec) + spec.moe_layers * experts


def parameters_of_rank(spec: ModelSpec, layout: Layout, *, first: bool, last: bool) -> int:
    """Weights that one rank of a stage holds in Megatron, without its experts.

    Args:
        layout: Its stages divide the layers.
        first: The stage has the embedding.
        last: It has the output layer; of a tied embedding a copy, unless it is the first as well.
    """
    tp, pp = layout.tensor_parallel, layout.pipeline_parallel
    table = padded_vocab_size(spec.vocab, tp) // tp * spec.hidden
    routers = spec.moe_layers * spec.experts * spec.hidden
    alike = spec.layers * layer_norms(spec) + routers
    layers = -(-(shared_matrices(spec) // tp + alike) // pp)
    tables = 1 if first and last and spec.tied else int(first) + int(last)
    return layers + tables * table + (spec.hidden if last else 0)


def expert_parameters_of_rank(spec: ModelSpec, layout: Layout) -> int:
    """Weights of experts that one rank of a stage holds."""
    all_of_them = spec.moe_layers * spec.experts * expert_matrices(spec)
    sharing = layout.expert_parallel * layout.expert_tensor_parallel
    return -(-all_of_them // (layout.pipeline_parallel * sharing))


def largest_parameter_of_rank(spec: ModelSpec, layout: Layout) -> int:
    """Elements of the largest Megatron parameter of a rank, experts apart."""
    tp = layout.tensor_parallel
    table = padded_vocab_size(spec.vocab, tp) // tp * spec.hidden
    dense = spec.moe_layers < spec.layers
    return max(table, 2 * spec.ffn // tp * spec.hidden if dense else 0)
