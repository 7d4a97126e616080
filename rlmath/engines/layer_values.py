"""Values inside an engine's layers, recorded by hooks in its workers.

The engine reads one sequence once, without other requests. vLLM's modules have the names of the
Hugging Face folder, except those that it fuses.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Values by layer (-1: before the first) and step.
Values = dict[tuple[int, str], Tensor]

EMBEDDING = "embed_tokens (word_embeddings)"
NORM = "norm (final_layernorm)"
HEAD = "lm_head (output_layer)"
# Attributes of a worker: handles of its hooks, and what they noted.
_HOOKS, _NOTED = "_rlmath_hooks", "_rlmath_values"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.([a-z_.]+)$")
# Steps of a layer whose value is the output of one module, complete on every worker.
_WHOLE = {"mlp": "mlp", "block_sparse_moe": "mlp"}
_NORMS_BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_NORMS_AFTER = {"post_attention_layernorm": "attention_out", "post_feedforward_layernorm": "mlp"}
_ONE_OF_QKV = {f"self_attn.{one}_proj": one for one in "qkv"}
# Layer index of values after the last layer, whose number a worker does not know.
AFTER_LAYERS = 1 << 30
# By key, a worker's part of a value, and whether the parts are columns of the whole.
Noted = dict[tuple[int, str], tuple[Tensor, bool]]


class Reading:
    """Has one engine read a sequence; a class, so that it can go to the engines."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, engine: Any) -> bool:
        """Read the sequence in the engine's thread; false if the engine has other requests."""
        from vllm.sampling_params import SamplingParams

        if engine.has_unfinished_requests():
            return False
        name = f"rlmath-values-{uuid.uuid4().hex}"
        # Greedy sampling advances no random stream; the salt keeps the prefix cache out.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prompt = {"prompt_token_ids": self.tokens, "cache_salt": name}
        engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        return True


def watch(worker: Any) -> None:
    """Runs in a vLLM worker: put hooks on the modules whose values are compared."""
    noted: Noted = {}
    model = worker.model_runner.get_model()
    modules = dict(model.named_modules())
    after = any(name.endswith("post_feedforward_layernorm") for name in modules)
    handles = []
    for name, module in modules.items():
        handles += _hooks_of(name.removesuffix(".base_layer"), module, after, noted)
    worker.__dict__[_HOOKS], worker.__dict__[_NOTED] = handles, noted


def noted_values(worker: Any) -> Noted:
    """Runs in a vLLM worker: return what its hooks recorded, and remove them."""
    for handle in worker.__dict__.pop(_HOOKS, []):
        handle.remove()
    noted: Noted = worker.__dict__.pop(_NOTED, {})
    return noted


def _hooks_of(name: str, module: Any, after: bool, noted: Noted) -> list[Any]:
    """Hooks on one module; none where nothing of it is compared. ``after``: the model has its norms
    after attention and feed-forward. ``noted``: gets the values."""

    def note(key: tuple[int, str], value: Tensor, columns: bool = False) -> None:
        # A copy, since later operations may work in place. A long prompt comes in several pieces.
        rows = value.detach().float().cpu().reshape(-1, value.shape[-1]).clone()
        if key in noted:
            rows = torch.cat([noted[key][0], rows])
        noted[key] = rows, columns

    def output(keep: Callable[[Tensor], None]) -> Any:
        def hook(_: Any, __: Any, result: Any) -> None:
            keep(result[0] if isinstance(result, tuple) else result)

        return module.register_forward_hook(hook)

    if name.endswith("embed_tokens"):
        return [output(lambda value: note((-1, EMBEDDING), value))]
    if type(module).__name__ == "LogitsProcessor":
        return [output(lambda value: _note_logits(noted, value))]
    found = _LAYER.search(name)
    if found is None:
        if re.search(r"(?:^|\.)norm$", name) is None:
            return []
        return [output(lambda value: note((AFTER_LAYERS, NORM), value))]
    layer, step = int(found[1]), found[2]
    norms = _NORMS_AFTER if after else _NORMS_BEFORE
    if step in norms:
        return [output(lambda value: note((layer, norms[step]), value))]
    if step in _WHOLE and not after:
        return [output(lambda value: note((layer, _WHOLE[step]), value))]
    if step in _ONE_OF_QKV:
        return [output(lambda value: note((layer, _ONE_OF_QKV[step]), value, True))]
    if step == "self_attn.qkv_proj":
        return [output(lambda value: _note_qkv(module, layer, value, note))]
    if step == "mlp.gate_up_proj":

        def gate_and_up(value: Tensor) -> None:
            gate, up = value.chunk(2, -1)
            note((layer, "gate"), gate, True)
            note((layer, "up"), up, True)

        return [output(gate_and_up)]
    if step in ("self_attn.o_proj", "linear_attn.out_proj"):

        def take(_: Any, inputs: Any, kwargs: Any) -> None:
            value = inputs[0] if inputs else kwargs["input_"]
            note((layer, "attention"), value, True)

        handles = [module.register_forward_pre_hook(take, with_kwargs=True)]
        if not after:
            handles.append(output(lambda value: note((layer, "attention_out"), value)))
        return handles
    return []


def _note_logits(noted: Noted, value: Tensor | None) -> None:
    """Note the last row's logits; only one worker may have them."""
    if value is not None:
        noted[AFTER_LAYERS, HEAD] = value.detach().float().cpu()[-1:].clone(), False


def _note_qkv(module: Any, layer: int, value: Tensor, note: Callable[..., None]) -> None:
    """vLLM's rows of query, key and value; a key head may be on several workers."""
    heads, kv_heads = module.num_heads, module.num_kv_heads
    parts = value.split([n * module.head_size for n in (heads, kv_heads, kv_heads)], -1)
    counts = module.tp_rank % module.num_kv_head_replicas == 0
    for which, part in zip("qkv", parts, strict=True):
        if which == "q" or counts:
            note((layer, which), part, True)
