"""Counts the bytes of live meta storages, on the GPU and on the host, and their peak by phase."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Pool = Literal["gpu", "host"]
META = torch.device("meta")
# Host tensors from this size on are counted, and are meta tensors too; smaller ones are real.
HOST_BYTES = 4 * 2**20
# Integer tensors up to this size keep their values, so that lengths can be read back.
_CONSTANT_ITEMS = 4096
_VALUES = "_dry_run_values"

aten = torch.ops.aten


@dataclass
class Peak:
    """The most that one pool held in a phase.

    Attributes:
        num_bytes: How much.
        contents: Bytes by type and shape at that moment.
    """

    num_bytes: int = 0
    contents: Mapping[str, int] = field(default_factory=dict)


class Meter(TorchDispatchMode):
    """While active: every new meta storage is counted until it is freed.

    Reads of values, which meta tensors do not have, are answered: integers that came from the host
    by their value, all else by 1, which neither stops an update early nor skips a step.

    Attributes:
        live: Bytes by pool.
        peak: Since :meth:`phase` began.
        routed: Given a mask of an MoE's routing, how many of its items are true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[Pool, int] = {"gpu": 0, "host": 0}
        self.peak: dict[Pool, Peak] = {"gpu": Peak(), "host": Peak()}
        self.routed: Callable[[Tensor], int | None] = lambda mask: None
        self._storages: dict[int, tuple[Pool, int, str]] = {}
        self._contents: dict[Pool, Counter[str]] = {"gpu": Counter(), "host": Counter()}
        self._new_pool: Pool = "gpu"

    @contextmanager
    def phase(self) -> Iterator[dict[Pool, Peak]]:
        """Start the peaks afresh; the result holds them when the phase is over. Phases nest: the
        outer one's peak covers the inner one."""
        found: dict[Pool, Peak] = {}
        outer = dict(self.peak)
        for pool in self.live:
            self.peak[pool] = Peak(self.live[pool], dict(self._contents[pool]))
        yield found
        found.update(self.peak)
        for pool, peak in outer.items():
            self.peak[pool] = max(peak, found[pool], key=lambda one: one.num_bytes)

    @contextmanager
    def host(self) -> Iterator[None]:
        """New storages stand for host memory."""
        before, self._new_pool = self._new_pool, "host"
        try:
            yield
        finally:
            self._new_pool = before

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a meta tensor stands for one in host memory."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known[0] == "host"

    def remember(self, tensor: Tensor, values: Tensor) -> None:
        """Keep the values of a small integer tensor that goes from the host to the GPU."""
        if not values.dtype.is_floating_point and values.numel() <= _CONSTANT_ITEMS:
            tensor.__dict__[_VALUES] = values.clone()

    def known_values(self, tensor: Tensor) -> Tensor | None:
        """The tensors that :meth:`remember` kept, also through arithmetic and views."""
        return tensor.__dict__.get(_VALUES)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = self._answer(func, args, kwargs)
        out = func(*args, **kwargs) if answer is NotImplemented else answer
        new = [x for x in _tensors(out) if x.device == META and self._is_new(x)]
        inputs = list(_tensors(args))
        if new:
            pool = "host" if func is aten._to_copy.default and answer is out else self._new_pool
            if pool == "gpu" and any(x.device == META and self.is_host(x) for x in inputs):
                pool = "host"
            for x in new:
                self._track(x, pool)
        if isinstance(out, Tensor) and out.device == META:
            self._propagate(func, args, kwargs, inputs, out)
        return out

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata not in self._storages and storage.nbytes() > 0

    def _track(self, tensor: Tensor, pool: Pool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        self._storages[key] = (pool, size, what)
        weakref.finalize(storage, self._free, key)
        self._count(pool, what, size)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """In the place of ``rlmath.actor.offload.resize``: memory of a storage that goes or comes
        back."""
        storage.resize_(num_bytes)
        if storage._cdata not in self._storages:
            return  # A piece without elements.
        pool, before, what = self._storages[storage._cdata]
        self._storages[storage._cdata] = (pool, num_bytes, what)
        self._count(pool, what, num_bytes - before)

    def _count(self, pool: Pool, what: str, num_bytes: int) -> None:
        self.live[pool] += num_bytes
        self._contents[pool][what] += num_bytes
        if not self._contents[pool][what]:
            del self._contents[pool][what]
        if self.live[pool] > self.peak[pool].num_bytes:
            self.peak[pool] = Peak(self.live[pool], dict(self._contents[pool]))

    def _free(self, key: int) -> None:
        pool, size, what = self._storages.pop(key)
        self._count(pool, what, -size)

    def _propagate(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, inputs: list[Tensor], out: Tensor
    ) -> None:
        """Values of a small integer tensor that follow from known ones."""
        if out.dtype.is_floating_point or out.numel() > _CONSTANT_ITEMS or not inputs:
            return
        if func._schema.is_mutable:
            return
        known = {id(x): self.known_values(x) for x in inputs if x.device == META}
        if not known or any(value is None for value in known.values()):
            return

        def value(x: Any) -> Any:
            return known.get(id(x), x) if isinstance(x, Tensor) else x

        moved = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        result = func(*(value(x) for x in args), **{k: value(v) for k, v in moved.items()})
        out.__dict__[_VALUES] = result

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            return target if target.device != META and source.device == META else NotImplemented
        if first is None or first.device != META:
            return NotImplemented
        if func is aten._local_scalar_dense.default:
            known = self.known_values(first)
            return known.item() if known is not None else torch.ones([], dtype=first.dtype).item()
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(first, kwargs.get("dtype") or first.dtype)
        if func is aten.nonzero.default:
            return first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
        if func is aten.masked_select.default:
            count = self.routed(args[1])
            return first.new_empty((args[1].numel() if count is None else count,))
        if func is aten.equal.default:
            return True
        return NotImplemented

    def _to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        known = self.known_values(tensor)
        if known is not None:
            return known.to(dtype)
        if tensor.numel() * dtype.itemsize < HOST_BYTES:
            return torch.ones(tensor.shape, dtype=dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=META)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _tensors(branch)
