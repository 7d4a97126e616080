"""Tensors that vLLM's reload holds back until it has all of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def keep_pending(model: Any, buffer: Tensor) -> None:
    """Copy tensors that vLLM holds back for a layer whose others are in a later bucket.

    The reload references a layer's tensors until it has all of them (such as query without key and
    value), but the buffer is overwritten meanwhile.

    Args:
        model: vLLM's model; an adapters' inbox holds nothing back.
        buffer: Memory that the tensors were views of.
    """
    if not isinstance(model, torch.nn.Module):
        return
    begin = buffer.untyped_storage().data_ptr()
    end = begin + buffer.untyped_storage().nbytes()
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for key, value in bound.arguments.items():
                if isinstance(value, Tensor) and begin <= value.data_ptr() < end:
                    bound.arguments[key] = value.clone()
