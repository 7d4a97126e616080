"""Fingerprints of what engines hold that quantize the weights they are sent.

A matrix of a layer is held as FP8 values and a scale for each row (``rlmath.model.fp8``), and its
fingerprints are of these; everything else is held as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlmath.model.fp8 import quantized
from rlmath.model.lora import TARGETS
from rlmath.weights.fingerprint import fingerprint
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.slices import WeightSlice

SCALE = "_scale"


def is_quantized(name: str) -> bool:
    """Whether engines quantize a tensor, by its name in the files: the matrices of layers."""
    module = name.removesuffix(".weight")
    return module != name and module.rpartition(".")[2] in TARGETS


def quantized_fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Of whole tensors as they were sent, the fingerprints of what engines make of them."""
    found = {}
    for name, tensor in tensors:
        if is_quantized(name):
            values, scale = quantized(tensor)
            found[name] = fingerprint(values.view(torch.uint8))
            found[name + SCALE] = fingerprint(scale)
        else:
            found[name] = fingerprint(tensor)
    return found


@torch.no_grad()
def sent_fingerprints(gatherer: BucketGatherer, part: WeightSlice | None = None) -> dict[str, int]:
    """The same of a rank's copy of the model. Collective; rank 0 has them, the others none.

    The scale of a row needs all of it, which tensor ranks may share, so tensors are gathered.

    Args:
        gatherer: Of the model.
        part: Only these tensors; ``None``: all.
    """
    names = None if part is None else part.keys()
    buckets = gatherer.gather(0, names=names)
    return quantized_fingerprints(one for bucket in buckets for one in bucket)
