"""Makes this process believe in a CUDA device whose tensors are meta tensors.

For its own process: what is replaced stays replaced. Import Megatron after :func:`install`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.attention.varlen
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.dry_run import kernels
from benchmarks.dry_run.meter import HOST_BYTES, META, Meter


class CudaIsMeta(TorchFunctionMode):
    """While active: devices named ``cuda`` are ``meta``; large host tensors are meta as well."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            if args and isinstance(args[0], int):
                return META
            return _map(func(*args, **kwargs))
        if func is torch.tensor:
            args = (_numbers(args[0]), *args[1:])
        if func in (torch.autograd.backward, Tensor.backward):
            # A mode is off inside of what it handles, and a backward pass is a whole program.
            with self:
                return _backward(*args, **kwargs)
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return kernels.rms_norm(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return kernels.attention(*args[:3])
        if func is Tensor.type and len(args) == 1 and not kwargs and args[0].device == META:
            return "torch.cuda." + _TYPE_NAMES[args[0].dtype]
        if func is Tensor.tolist and args[0].device == META:
            return args[0].cpu().tolist()
        if func is Tensor.record_stream:
            return None
        if func is Tensor.cuda:
            func, args, kwargs = Tensor.to, (args[0], META), {}
        kwargs.pop("pin_memory", None)
        if func in _LARGE_ON_HOST and kwargs.get("device") in ("cpu", torch.device("cpu")):
            return self._on_host(func, args, kwargs)
        args = tuple(_map(x) for x in args)
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = META if isinstance(device, int) else _map(device)
        if func is Tensor.to and META in (*args[1:], kwargs.get("device")):
            return self._to_gpu(args, kwargs)
        return func(*args, **kwargs)

    def _to_gpu(self, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        source: Tensor = args[0]
        if source.device != META:
            moved: Tensor = Tensor.to(*args, **kwargs)
            self._meter.remember(moved, source)
            return moved
        if self._meter.is_host(source):
            dtype = next((x for x in args if isinstance(x, torch.dtype)), source.dtype)
            return torch.empty(source.shape, dtype=dtype, device=META)
        return Tensor.to(*args, **kwargs)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        shape: Any = kwargs.get("size", args[0] if args else ())
        if isinstance(shape, int):
            shape = tuple(x for x in args if isinstance(x, int))
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if torch.Size(shape).numel() * dtype.itemsize < HOST_BYTES:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        with self._meter.host():
            return func(*args, **{**kwargs, "device": META})  # type: ignore[no-any-return]


_LARGE_ON_HOST = (torch.empty, torch.zeros)
_TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float16: "HalfTensor",
    torch.float64: "DoubleTensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.bool: "BoolTensor",
}


def _backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """``torch.autograd.backward`` without its own look at modes."""
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else None
    given = list(grad_tensors) if grads is None else grads * len(outputs)
    starts = tuple(
        torch.ones_like(output) if grad is None else grad
        for output, grad in zip(outputs, given, strict=True)
    )
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), starts, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _numbers(data: Any) -> Any:
    """Arguments of ``torch.tensor`` with the values of meta tensors in them."""
    if isinstance(data, list | tuple):
        return [_numbers(x) for x in data]
    return data.cpu() if isinstance(data, Tensor) and data.device == META else data


def _map(x: Any) -> Any:
    if isinstance(x, torch.device):
        return META if x.type == "cuda" else x
    return META if isinstance(x, str) and x.startswith("cuda") else x


class _Nothing:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = META

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: _Nothing()


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Replace what torch says of CUDA, and compilation by the plain function."""
    cuda: Any = torch.cuda
    state = torch.get_rng_state()
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = cuda.device = _nothing
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda._lazy_init = lambda: None
    pins = {f"cudaHost{name}": lambda *_: 0 for name in ("Register", "Unregister")}
    cuda.cudart = lambda: SimpleNamespace(**pins)
    cuda.get_rng_state, cuda.set_rng_state = lambda *_, **__: state, lambda *_, **__: None
    cuda.is_initialized = lambda: True
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    torch.compile = _not_compiled  # type: ignore[assignment]
    varlen: Any = torch.nn.attention.varlen
    varlen.varlen_attn = kernels.varlen_attention(varlen.varlen_attn)
    # A mask by which rows are taken takes them all.
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: state
    random._set_cuda_rng_state = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = lambda self, *_, **__: _nothing()


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return functools.partial(_not_compiled) if function is None else function
