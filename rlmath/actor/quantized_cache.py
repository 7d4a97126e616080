"""The actor's attention with keys and values stored as in engines with
``rollout.kv_cache_dtype=fp8``.

Used only to measure how far such an engine may differ, like ``quantized_products.py``. Kernels for
GPUs may have the queries in FP8 too, which is not reproduced here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlmath.model.fp8 import round_cached

# Megatron's name of the module with a layer's rotated and normalized queries, keys and values.
ATTENTION = "core_attention"


@contextlib.contextmanager
def quantized_cache(module: nn.Module) -> Iterator[None]:
    """Let a rank's stage attend to keys and values rounded to FP8. ``module``: a rank's stage."""

    @torch.no_grad()
    def before(attention: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = arguments
        return query, round_cached(key), round_cached(value), *rest

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            if name.rpartition(".")[2] == ATTENTION:
                stack.callback(part.register_forward_pre_hook(before).remove)
        yield
