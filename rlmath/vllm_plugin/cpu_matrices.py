"""Where vLLM's CPU layers hold the address of a matrix that they packed for oneDNN.

A layer's product takes the address in a tensor of one element. A recording of the product
(``cpu_recordings.py``) refers to that tensor, so it stays the same one when the
layer gets a new matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def address_of(module: Any) -> Tensor | None:
    """``[1]`` int64, the address of a layer's packed matrix.

    Args:
        module: A layer of a vLLM model.

    Returns:
        ``None``: the layer has no such matrix.
    """
    handle = _handle_of(module)
    address: Tensor | None = None if handle is None else handle.handler_tensor
    return address


@contextmanager
def kept_address(module: Any) -> Iterator[None]:
    """Pack another matrix of the layer in this block: its address comes into the same tensor.

    The old matrix is freed first.
    """
    handle = _handle_of(module)
    address = None if handle is None else handle.handler_tensor
    old = None if handle is None else weakref.ref(handle)
    del handle
    module.cpu_linear = None
    # Whoever still had it would free the new matrix in its place.
    is_free = old is not None and old() is None
    yield
    new = _handle_of(module)
    if address is not None and is_free and new is not None:
        address.copy_(new.handler_tensor)
        new.handler_tensor = address


def _handle_of(module: Any) -> Any:
    """vLLM's ``CPUDNNLGEMMHandler`` of a layer, which the function that multiplies closes over."""
    multiply = getattr(module, "cpu_linear", None)
    names = getattr(getattr(multiply, "__code__", None), "co_freevars", ())
    if "handler" not in names:
        return None
    assert multiply is not None
    return multiply.__closure__[names.index("handler")].cell_contents
