"""Lets Megatron-core run in a process without CUDA.

Megatron names CUDA in the middle of its code: it asks ``torch.cuda.current_device()`` where to
put a buffer, creates tensors with ``device="cuda"``, and compares ``Tensor.type()`` with the names
of CUDA types. :func:`install` answers all of that with the CPU, by replacing a handful of functions
in ``torch`` for the life of the process. They are replaced one by one, rather than through a
``TorchFunctionMode``, because a mode holds in one thread only (the autograd engine has its own) and
slows every operator.

Never install this in a process that hosts vLLM, which decides by the same functions what it runs
on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)
_installed = False


class _NullStream:
    """A stream on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CPU

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _NullEvent()


class _NullEvent:
    """An event that has already occurred."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def install() -> None:
    """Answer Megatron's CUDA calls with the CPU, in this process and for good. Idempotent. Raises
    RuntimeError: vLLM is already imported here, or this process does have CUDA."""
    global _installed
    if _installed:
        return
    import sys

    if "vllm.engine" in sys.modules or "vllm.v1.engine" in sys.modules:
        raise RuntimeError("the CPU shim for Megatron must not share a process with a vLLM engine")
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim for Megatron is for processes without CUDA")

    # ``with torch.device(...)`` recognizes factories by identity, from a list made at its first
    # use; it has to be made of the originals, or transformers' models stay half initialized.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron decorates functions that are off here; the compiler alone takes seconds to import.
    torch.compile = _as_is  # type: ignore[assignment]
    _patch_tensor_methods()
    _patch_cuda_module()
    _installed = True


def _as_is(function: Any = None, **_: Any) -> Any:
    """In the place of ``torch.compile``, as a decorator or called with options."""
    return function if function is not None else _as_is


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _patch_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, *args, **kwargs)

    def cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def module_cuda(self: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        return self

    def record_stream(self: torch.Tensor, _: Any) -> None: ...

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = module_cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]


def _patch_cuda_module() -> None:
    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda: None
    cuda.Stream = _NullStream
    cuda.Event = _NullEvent
    cuda.current_stream = lambda *_, **__: _NullStream()
    cuda.default_stream = lambda *_, **__: _NullStream()
    cuda.stream = nothing
    cuda.device = nothing
    cuda.manual_seed = torch.default_generator.manual_seed
    # torch.manual_seed() calls this one too, so it must not call back.
    cuda.manual_seed_all = torch.default_generator.manual_seed
    # Megatron's tracker of random states saves and restores the CUDA generator; the CPU's takes
    # its place, so that dropout and initialization stay reproducible across ranks.
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.nvtx.range_push = lambda *_, **__: None
    cuda.nvtx.range_pop = lambda *_, **__: None
    cuda.nvtx.range = nothing

    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.attention as megatron_attention
    import megatron.core.transformer.mlp as megatron_mlp
    import megatron.core.transformer.moe.token_dispatcher as megatron_experts

    from rlmath.device.cpu_ops import PackedRotary, swiglu, weighted_swiglu

    # Megatron's own are compiled for CUDA.
    megatron_mlp.bias_swiglu_impl = swiglu
    megatron_mlp.weighted_bias_swiglu_impl = weighted_swiglu
    megatron_attention.apply_rotary_pos_emb = PackedRotary(megatron_attention.apply_rotary_pos_emb)

    all_to_all = megatron_experts.all_to_all

    def all_to_all_by_lists(group: Any, tokens: torch.Tensor, *splits: Any) -> Any:
        # Counts come off a GPU as arrays; those of a CPU are tensors still, which torch refuses.
        return all_to_all(
            group, tokens, *(None if s is None else list(map(int, s)) for s in splits)
        )

    megatron_experts.all_to_all = all_to_all_by_lists

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
