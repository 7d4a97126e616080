"""Constants of vLLM's workers, and their own parameters."""

from __future__ import annotations

from typing import Any

import torch

from rlmath.checkpoint.optimizer_prints import checksum

# Where rotary embeddings are looked at: so far that another theta shows in bfloat16.
POSITION = 64


def inverse_frequencies(module: Any) -> list[tuple[str, Any]]:
    """Name and tensor of the inverse frequencies of a rotary embedding of transformers.

    vLLM has such modules in models that it takes from transformers, such as OLMo-2; its own keep
    cosines and sines (``cos_sin_cache``).
    """
    buffers = getattr(module, "_buffers", {})
    names = (name for name in buffers if name.endswith("inv_freq") and "original" not in name)
    return [(name, buffers[name]) for name in names]


def worker_constants(worker: Any) -> dict[str, Any]:
    """Runs in a vLLM worker: epsilons of its norms, and its different rotary embeddings, each with
    type, position and values there, cosines before sines, as they are scaled."""
    epsilons: set[float] = set()
    ropes: list[dict[str, Any]] = []
    for module in worker.model_runner.get_model().modules():
        # The norm of a gated delta net has the short name.
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is not None:
            epsilons.add(float(epsilon))
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            position = min(POSITION, len(cache) - 1)
            ropes.append(_rope(cache.dtype, position, cache[position].double()))
        for name, inverse in inverse_frequencies(module):
            angles = POSITION * inverse.double()
            # transformers' name for it; yarn has one.
            scaling = name.removesuffix("inv_freq") + "attention_scaling"
            values = torch.cat([angles.cos(), angles.sin()]) * getattr(module, scaling, 1.0)
            ropes.append(_rope(inverse.dtype, POSITION, values))
    # Layers share them, or have equal ones.
    different = [rope for n, rope in enumerate(ropes) if rope not in ropes[:n]]
    return {"norm_eps": sorted(epsilons), "ropes": different}


def _rope(dtype: torch.dtype, position: int, values: torch.Tensor) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "position": position, "values": values.tolist()}


def parameter_sums(worker: Any) -> dict[str, int]:
    """Runs in a vLLM worker: checksums of its parameters. A CPU's packed matrices are in none."""
    named = worker.model_runner.get_model().named_parameters()
    return {name: checksum(parameter) for name, parameter in named}
