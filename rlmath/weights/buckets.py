"""Buckets of whole tensors and their places in a flat buffer: the same cut on every side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Each tensor begins at a multiple of this in its bucket's buffer, for any reader's alignment.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorMeta:
    """Name, shape and type of a whole Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BucketTensor:
    """A tensor and its place in its bucket's flat buffer."""

    meta: TensorMeta
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, in model order.

    Attributes:
        tensors: What it holds.
        num_bytes: Length of its flat buffer, with the gaps that alignment leaves.
    """

    tensors: tuple[BucketTensor, ...]
    num_bytes: int


def align(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT_BYTES``."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def cut_into_buckets(tensors: Sequence[TensorMeta], bucket_size_mib: float) -> list[Bucket]:
    """Cut a list of tensors, in order, into buckets of at most ``bucket_size_mib`` MiB.

    A tensor that is larger is a bucket of its own. The first bucket has an eighth of the size, so
    that whoever takes them need not wait long for the first.
    """
    limit_bytes = int(bucket_size_mib * 2**20)
    buckets: list[Bucket] = []
    held: list[BucketTensor] = []
    at = 0
    for meta in tensors:
        limit_here = limit_bytes if buckets else limit_bytes // 8
        if held and at + meta.num_bytes > limit_here:
            buckets.append(Bucket(tuple(held), at))
            held, at = [], 0
        held.append(BucketTensor(meta, at))
        at += align(meta.num_bytes)
    if held:
        buckets.append(Bucket(tuple(held), at))
    return buckets


def view_in_buffer(buffer: Tensor, tensor: BucketTensor) -> Tensor:
    """A tensor of a bucket as a view of the bucket's flat buffer.

    Args:
        buffer: uint8, contiguous, at least the bucket's ``num_bytes`` long.
        tensor: Of that bucket.
    """
    begin = tensor.offset_bytes
    flat = buffer[begin : begin + tensor.meta.num_bytes]
    return flat.view(tensor.meta.dtype).view(tensor.meta.shape)
