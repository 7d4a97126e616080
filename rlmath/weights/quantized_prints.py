"""Fingerprints of engines that quantize the weights they receive.

A layer's matrix is stored as FP8 values and a scale per row (``rlmath.model.fp8``), and has
fingerprints of both; everything else is stored as sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlmath.model.fp8 import quantize
from rlmath.model.lora import TARGETS
from rlmath.weights.fingerprint import fingerprint
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.slices import WeightSlice

SCALE = "_scale"


def is_quantized(name: str) -> bool:
    """Whether engines quantize a tensor, by its name in the files: matrices of layers."""
    module = name.removesuffix(".weight")
    return module != name and module.rpartition(".")[2] in TARGETS


def quantized_fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Fingerprints that engines should have for these whole tensors."""
    found = {}
    for name, tensor in tensors:
        if is_quantized(name):
            values, scale = quantize(tensor)
            found[name] = fingerprint(values.view(torch.uint8))
            found[name + SCALE] = fingerprint(scale)
        else:
            found[name] = fingerprint(tensor)
    return found


@torch.no_grad()
def sent_fingerprints(gatherer: BucketGatherer, part: WeightSlice | None = None) -> dict[str, int]:
    """:func:`quantized_fingerprints` of a rank's copy of the model. Collective; only rank 0 gets
    them.

    A row's scale needs the whole row, which tensor ranks may share, so tensors are gathered.
    ``gatherer``: gatherer of the model. ``part``: only these tensors; ``None``: all.
    """
    names = None if part is None else part.keys()
    buckets = gatherer.gather(0, names=names)
    return quantized_fingerprints(one for bucket in buckets for one in bucket)
