"""Sizes of published models by name, so that a plan or a check needs no download."""

from __future__ import annotations

import re
from typing import Any

from rlmath.errors import UserError
from rlmath.model.spec import ModelSpec, model_spec

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

# Fine-tuned versions with the sizes of the model that they are named after.
_SAME_SIZES = re.compile(r"-(instruct|base|chat|it)$")


def published_name(name: str) -> str | None:
    """The key of ``KNOWN`` that a name stands for; ``None``: none.

    An organization, upper and lower case and endings such as ``-Instruct`` do not matter, and the
    beginning of one name is enough.

    Raises:
        UserError: It is the beginning of several.
    """
    short = name.rsplit("/", 1)[-1].lower()
    known = {key.lower(): key for key in KNOWN}
    for candidate in (short, _SAME_SIZES.sub("", short)):
        if candidate in known:
            return known[candidate]
    begun = [key for lower, key in known.items() if short and lower.startswith(short)]
    if len(begun) > 1:
        raise UserError(f"{name}: is the beginning of {', '.join(begun)}; give one of them")
    return begun[0] if begun else None


def published_spec(name: str) -> ModelSpec | None:
    """Sizes of a published model by its whole name; ``None``: it is not known."""
    short = name.rsplit("/", 1)[-1].lower()
    known = {key.lower(): key for key in KNOWN}
    key = known.get(short) or known.get(_SAME_SIZES.sub("", short))
    return None if key is None else model_spec(KNOWN[key], name)
