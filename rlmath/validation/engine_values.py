"""Values inside an engine's layers, under the weights that it has, by the keys of ``hooks.py``.

The engine reads one sequence, once, beside no other request; hooks in its workers note what its
modules give. vLLM's modules have the names of the Hugging Face folder but for those that it fuses.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlmath.rollout.pool import RolloutPool
from rlmath.validation.hooks import EMBEDDING, HEAD, NORM, Values

# Of a worker: handles of its hooks, and what they noted.
_HOOKS, _NOTED = "_rlmath_hooks", "_rlmath_values"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.([a-z_.]+)$")
# Steps of a layer that one module gives, whole on every worker.
_WHOLE = {"mlp": "mlp", "block_sparse_moe": "mlp"}
_NORMS_BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_NORMS_AFTER = {"post_attention_layernorm": "attention_out", "post_feedforward_layernorm": "mlp"}
_ONE_OF_QKV = {f"self_attn.{one}_proj": one for one in "qkv"}
# In the place of the number of layers, which a worker does not know.
_LAST = 1 << 30
# By key, what a worker has of a value, and whether the workers' parts are columns of the whole.
Noted = dict[tuple[int, str], tuple[Tensor, bool]]


def engine_values(
    pool: RolloutPool, tokens: list[int], layers: int, index: int = 0
) -> Values | None:
    """What an engine computes from one sequence.

    Args:
        pool: Its engines, with their weights.
        tokens: The sequence.
        layers: Of the model.
        index: Of the engine.

    Returns:
        In float32, on the host; of the output layer the last row alone. ``None``: the engine has
        other requests, whose tokens would be among these.
    """
    pool.call_workers(watch)
    try:
        read = pool.call_engines(_Reading(tokens))
    finally:
        noted = pool.call_workers(noted_values)
    if not read[index]:
        return None
    values = together(noted[index])
    return {(layers if at == _LAST else at, step): one for (at, step), one in values.items()}


class _Reading:
    """Has one engine read a sequence; a class, so that it can go to the engines."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, engine: Any) -> bool:
        """Whether the engine had nothing else to do. In the engine's thread; each of several
        engines reads it, as they are called alike."""
        from vllm.sampling_params import SamplingParams

        if engine.has_unfinished_requests():
            return False
        name = f"rlmath-values-{uuid.uuid4().hex}"
        # Greedy: no random stream moves. The salt: nothing is taken from the prefix cache.
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
    """Runs in a vLLM worker: what its hooks noted. They are taken away."""
    for handle in worker.__dict__.pop(_HOOKS, []):
        handle.remove()
    noted: Noted = worker.__dict__.pop(_NOTED, {})
    return noted


def together(workers: list[Noted]) -> Values:
    """One engine's values from its workers', in the order of their tensor ranks."""
    values: Values = {}
    for key in workers[0]:
        parts = [noted[key] for noted in workers if key in noted]
        columns = parts[0][1]
        tensors = [part for part, _ in parts]
        values[key] = torch.cat(tensors, -1) if columns else tensors[0]
    return values


def _hooks_of(name: str, module: Any, after: bool, noted: Noted) -> list[Any]:
    """Hooks on one module; none where nothing of it is compared.

    Args:
        after: The model's norms stand behind attention and feed-forward.
        noted: Where they write.
    """

    def note(key: tuple[int, str], value: Tensor, columns: bool = False) -> None:
        # A copy: what follows may work in place. A long prompt comes in several pieces.
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
        return [output(lambda value: note((_LAST, NORM), value))]
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
    if step == "self_attn.o_proj":

        def taken(_: Any, inputs: Any, kwargs: Any) -> None:
            value = inputs[0] if inputs else kwargs["input_"]
            note((layer, "attention"), value, True)

        handles = [module.register_forward_pre_hook(taken, with_kwargs=True)]
        if not after:
            handles.append(output(lambda value: note((layer, "attention_out"), value)))
        return handles
    return []


def _note_logits(noted: Noted, value: Tensor | None) -> None:
    """Of the last row; only one worker may have them."""
    if value is not None:
        noted[_LAST, HEAD] = value.detach().float().cpu()[-1:].clone(), False


def _note_qkv(module: Any, layer: int, value: Tensor, note: Callable[..., None]) -> None:
    """vLLM's rows of query, key and value; a key head may be on several workers."""
    heads, kv_heads = module.num_heads, module.num_kv_heads
    parts = value.split([n * module.head_size for n in (heads, kv_heads, kv_heads)], -1)
    counts = module.tp_rank % module.num_kv_head_replicas == 0
    for which, part in zip("qkv", parts, strict=True):
        if which == "q" or counts:
            note((layer, which), part, True)
