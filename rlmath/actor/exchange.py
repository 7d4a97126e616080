"""Other weights in a model's parameters for a while, with no second copy of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


@contextlib.contextmanager
@torch.no_grad()
def swap_parameters(parameters: Sequence[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Put ``values`` into the parameters, and back what was in them at the end, bit by bit.

    One parameter at a time goes to host memory, into the room of the value that takes its place, so
    that the device holds no copy and the host one tensor more. Only values of another type than
    their parameter stay where they are, as a parameter cannot give them back.

    Args:
        parameters: On any device.
        values: In host memory, one for each parameter. Meanwhile it holds the parameters' own
            values; at the end what it held before, in other tensors.
    """
    # Of each parameter that was begun with: its own value, and the other one unless the parameter
    # holds that by now.
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
