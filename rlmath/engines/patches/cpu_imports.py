"""Imports vLLM without the compiler, which CPU engines do not use and which takes seconds to load.

vLLM changes a list in ``torch._inductor.lowering`` when it is imported, and leaves it alone where
that module cannot be imported. ``torch.compile`` loads the rest of the compiler for each function
that it decorates, also with ``TORCH_COMPILE_DISABLE=1``, which makes the result a no-op.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_LOWERING = "torch._inductor.lowering"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Import vLLM and create the engine in this block: both import modules."""
    import torch

    compile_, torch.compile = torch.compile, _as_is  # type: ignore[assignment]
    # None makes an import of it raise ImportError.
    blocked: Any = None
    is_new = sys.modules.setdefault(_LOWERING, blocked) is None
    try:
        import vllm.env_override  # noqa: F401

        if is_new:
            del sys.modules[_LOWERING]
            is_new = False
        yield
    finally:
        if is_new:
            del sys.modules[_LOWERING]
        torch.compile = compile_


def _as_is(function: Any = None, **_: Any) -> Any:
    """In the place of ``torch.compile``, as a decorator or called with options."""
    return function if function is not None else _as_is
