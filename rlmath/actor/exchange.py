"""Temporarily use other weights in a model's parameters, without a second copy of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


@contextlib.contextmanager
@torch.no_grad()
def swap_parameters(parameters: Sequence[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Swap ``values`` into the parameters, and swap back at the end, bit for bit.

    One parameter at a time is moved to host memory, into the space of the value that replaces it,
    so the device has no copy and the host one tensor more. Only values of a type other than their
    parameter's stay where they are, because a parameter cannot give them back.

    Args:
        parameters: On any device.
        values: Values in host memory, one per parameter. Inside the block it has the parameters'
            own values; afterwards its original values, in other tensors.
    """
    # For each swapped parameter: its own value, and the other one unless the parameter already has
    # it.
    own: list[Tensor] = []
    other: list[Tensor | None] = []
    try:
        for index, parameter in enumerate(parameters):
            value = values[index]
            own.append(parameter.detach().to("cpu", copy=True))
            other.append(value)
            parameter.detach().copy_(value)
            values[index] = own[index]
            if value.dtype == parameter.dtype:
                other[index] = None
            del value
        yield
    finally:
        for index, parameter in enumerate(parameters[: len(other)]):
            value = other[index]
            if value is None:
                value = parameter.detach().to("cpu", copy=True)
            parameter.detach().copy_(own[index])
            values[index] = value
