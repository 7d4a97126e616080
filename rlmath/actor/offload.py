"""Move a model's state to host memory while others need the device, and back.

The *storage* of a tensor is released: ``untyped_storage().resize_(0)``. The tensors stay the same
objects, so every view of a storage (``param.data`` in Megatron's bucket, ``main_grad``, the
optimizer's shards) is valid again once the storage has its bytes back. Until then it must not be
read: torch refuses to slice a tensor without storage, but copying it or adding to it crashes the
process (SIGSEGV, torch 2.13).

State has three parts:

===============  =================================================  ==================
part             tensors                                            in host memory
===============  =================================================  ==================
``parameters``   of the module; with the distributed optimizer they  a copy
                 are views of Megatron's ``param_data``
``gradients``    Megatron's ``grad_data``                            nothing: outside an
                                                                     update they are zero
``optimizer``    float32 main parameters, Adam's moments             a copy
===============  =================================================  ==================

Copies can be started in advance (:meth:`DeviceState.begin_copy`), in parallel with the caller,
other processes and the weight sync: :meth:`DeviceState.release` then waits for them and frees the
storages. A part must not be changed meanwhile without :meth:`DeviceState.load`, after which it is
copied again.

A tensor in a parameter's storage (a float32 model has no other main parameters) belongs to the
parameters. On CPU the "device" is host memory too, so the total does not shrink there:
:meth:`DeviceState.device_bytes` counts the storages of the model, not those of the process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlmath.actor.parameter_gather import ParameterGather
from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.device import Platform
from rlmath.device.streams import SideStream

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
# Alignment of storages in the host's buffer: sufficient for any type of tensor.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class _Released:
    """A storage without its bytes."""

    storage: torch.UntypedStorage  # Storage on the device.
    num_bytes: int  # Size to restore.
    place: int  # Offset in the host's buffer.


class DeviceState:
    """Moves parts of a model between device and host memory.

    Also the only place that ensures parameters are complete: after an optimizer step some may still
    have to arrive from other ranks (``parameter_gather.py``), and reading or moving them here first
    waits for these.

    Args:
        module: This rank's stage.
        models: Its chunks in Megatron's data-parallel wrapper; empty: not trained.
        optimizer: Megatron's optimizer; ``None``: not trained.
        platform: Platform of the device.
        gather: Gather of updated parameters; ``None``: they are always complete.
    """

    def __init__(
        self,
        module: Any,
        models: Sequence[Any],
        optimizer: Any,
        platform: Platform,
        gather: ParameterGather | None = None,
    ) -> None:
        self._gather = gather or ParameterGather([])
        self._module, self._models, self._optimizer = module, models, optimizer
        self._platform = platform
        self._released: dict[Part, list[_Released]] = {}
        # Released storages with a copy, by storage.
        self._out: dict[int, tuple[Part, _Released]] = {}
        # Parts on the device with a finished or running copy.
        self._copied: dict[Part, list[_Released]] = {}
        # Reused between releases: page-locking memory takes longer than the copy.
        self._host: dict[Part, Tensor] = {}

    @functools.cached_property
    def _stream(self) -> SideStream:
        return self._platform.side_stream()

    @torch.no_grad()
    def begin_copy(self, *parts: Part) -> None:
        """Start copying parts to host memory; they stay on the device until :meth:`release`."""
        for part in parts:
            if part not in self._released and part not in self._copied:
                if part == "parameters":
                    self._gather.finish()
                self._copied[part] = self._copy(part)

    @torch.no_grad()
    def release(self, *parts: Part) -> None:
        """Move parts off the device; no-op for released ones."""
        self.begin_copy(*parts)
        for part in parts:
            if part in self._copied:
                # The copies must be complete before the memory is reused.
                self._stream.wait()
                self._released[part] = self._copied.pop(part)
                for one in self._released[part]:
                    resize(one.storage, 0)
                    if part != "gradients":
                        self._out[one.storage._cdata] = part, one

    @torch.no_grad()
    def load(self, *parts: Part, complete: bool = True) -> None:
        """Restore parts, bit for bit. Parts on the device stay there, and are copied again before
        the next release. ``parts``: the parts. ``complete``: whether parameters will be read; if
        not, a forward pass waits for each itself."""
        if complete and "parameters" in parts:
            self._gather.finish()
        for part in parts:
            if self._copied.pop(part, None) is not None:
                self._stream.wait()
            if part in self._released:
                self._load(part)

    @contextlib.contextmanager
    def optimizer_readable(self) -> Iterator[None]:
        """Make the optimizer's tensors readable and writable where they are: on the device, or in
        host memory, without moving them. The parameters must be on the device. An optimizer with a
        started copy is released first, because the copy would miss these writes."""
        if "optimizer" in self._copied:
            self.release("optimizer")
        changed: list[tuple[Tensor, Tensor]] = []
        own = {id(parameter) for parameter in self._module.parameters()}
        try:
            for tensor in self._optimizer_tensors():
                # A parameter's hooks depend on its device.
                if id(tensor) not in own and (values := self.values(tensor)) is not None:
                    changed.append((tensor, tensor.data))
                    tensor.data = values
            yield
        finally:
            for tensor, data in changed:
                tensor.data = data

    def read(self, tensor: Tensor) -> Tensor:
        """The complete tensor, or its values in host memory while it is released."""
        self._gather.finish()
        values = self.values(tensor)
        return tensor if values is None else values

    def values(self, tensor: Tensor) -> Tensor | None:
        """A view of the tensor's values in host memory; ``None`` if it is on the device."""
        found = self._out.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        part, one = found
        flat = self._copy_of(part, one).view(tensor.dtype)
        return flat.as_strided(
            tensor.shape, tensor.stride(), flat.storage_offset() + tensor.storage_offset()
        )

    def device_bytes(self) -> int:
        """Device memory of the model's, buffers' and optimizer's storages."""
        found = _storages(
            [t for part in PARTS for t in self._tensors(part)] + list(self._module.buffers())
        )
        return sum(storage.nbytes() for storage in found)

    def host_bytes(self) -> int:
        """Host memory kept for copies."""
        return sum(buffer.numel() for buffer in self._host.values())

    def _copy(self, part: Part) -> list[_Released]:
        storages = self._own_storages(part)
        released, end = [], 0
        for storage in storages:
            released.append(_Released(storage, storage.nbytes(), end))
            end += -(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if part != "gradients":
            if part not in self._host or self._host[part].numel() != end:
                self._host.pop(part, None)
                self._host[part] = self._platform.host_buffer(end)
            self._stream.start()
            with self._stream.queue():
                for one in released:
                    self._copy_of(part, one).copy_(_bytes_of(one.storage), non_blocking=True)
        return released

    def _load(self, part: Part) -> None:
        for one in self._released.pop(part):
            self._out.pop(one.storage._cdata, None)
            resize(one.storage, one.num_bytes)
            if part == "gradients":
                _bytes_of(one.storage).zero_()
            else:
                copy = self._copy_of(part, one)
                _bytes_of(one.storage).copy_(copy, non_blocking=True)
        self._platform.synchronize()

    def _copy_of(self, part: Part, one: _Released) -> Tensor:
        return self._host[part][one.place : one.place + one.num_bytes]

    def _own_storages(self, part: Part) -> list[torch.UntypedStorage]:
        """A part's storages, except those that another part has."""
        others: set[int] = set()
        if part == "optimizer":
            taken = [*self._tensors("parameters"), *self._tensors("gradients")]
            others = {one.untyped_storage()._cdata for one in taken}
        found = _storages(self._tensors(part))
        return [one for one in found if one._cdata not in others]

    def _tensors(self, part: Part) -> Iterable[Tensor]:
        if part == "parameters":
            return list(self._module.parameters())
        if part == "optimizer":
            return self._optimizer_tensors()
        buffers = [(*one.buffers, *one.expert_parallel_buffers) for one in self._models]
        return [buffer.grad_data for of_chunk in buffers for buffer in of_chunk]

    def _optimizer_tensors(self) -> list[Tensor]:
        """Main parameters and Adam's moments; the step count stays."""
        if self._optimizer is None:
            return []
        found: list[Tensor] = []
        for part in optimizer_parts(self._optimizer):
            inner = part.optimizer
            found += [p for group in inner.param_groups for p in group["params"]]
            for state in inner.state.values():
                found += [x for x in state.values() if isinstance(x, Tensor) and x.dim()]
        return found


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Storages of the tensors, without duplicates, in order."""
    found = {one._cdata: one for one in (tensor.untyped_storage() for tensor in tensors)}
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)  # type: ignore[call-overload,no-any-return]


def resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Resize a storage. The dry run replaces this function to count."""
    storage.resize_(num_bytes)
