"""A model's state in host memory while others need the device, and back.

What is released is the *storage* of a tensor: ``untyped_storage().resize_(0)``. The tensors stay
the objects that they are, so every view of a storage (``param.data`` in Megatron's bucket,
``main_grad``, the optimizer's shards) is right again once the storage has its bytes back. Until
then nobody may read it: torch refuses to slice a tensor without storage, but to copy or add one up
ends the process (SIGSEGV, torch 2.13).

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

The copies can be begun ahead (:meth:`DeviceState.begin_copy`), beside the caller, other processes
and the weight sync: :meth:`DeviceState.release` then waits for them and frees the storages.
Nobody may change a part meanwhile without :meth:`DeviceState.load`, after which it is copied again.

A tensor that lies in a parameter's storage (a float32 model has no other main parameters) belongs
to the parameters. On CPU the "device" is host memory too, so that the sum of both does not shrink
there: :meth:`DeviceState.device_bytes` counts the storages of the model, not those of the process.
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
# Of a storage in the host's buffer: what any type of tensor is aligned to, and more.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class _Released:
    """A storage without its bytes.

    Attributes:
        storage: Of the device.
        num_bytes: That it has to have again.
        place: First byte in the host's buffer.
    """

    storage: torch.UntypedStorage
    num_bytes: int
    place: int


class DeviceState:
    """Which parts of a model are on the device, and how they go and come back.

    Also the one place where parameters are known to be complete: an optimizer step may have left
    some to come from other ranks (``parameter_gather.py``), and what reads or moves them here waits
    for these first.

    Args:
        module: This rank's stage.
        models: Its chunks in Megatron's data-parallel wrapper; empty: it is not trained.
        optimizer: Megatron's; ``None``: it is not trained.
        platform: Whose device it is.
        gather: Of updated parameters; ``None``: they are always complete.
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
        # Of those with a copy, by storage.
        self._out: dict[int, tuple[Part, _Released]] = {}
        # On the device, with a copy that is made or being made.
        self._copied: dict[Part, list[_Released]] = {}
        # Kept from one release to the next: page-locking memory takes longer than the copy.
        self._host: dict[Part, Tensor] = {}

    def is_out(self, part: Part) -> bool:
        """Whether a part has been released and not loaded since."""
        return part in self._released

    @functools.cached_property
    def _stream(self) -> SideStream:
        return self._platform.side_stream()

    @torch.no_grad()
    def begin_copy(self, *parts: Part) -> None:
        """Begin to copy parts to host memory, which stay on the device until :meth:`release`."""
        for part in parts:
            if part not in self._released and part not in self._copied:
                if part == "parameters":
                    self._gather.finish()
                self._copied[part] = self._copy(part)

    @torch.no_grad()
    def release(self, *parts: Part) -> None:
        """Take parts off the device; those that are out stay so."""
        self.begin_copy(*parts)
        for part in parts:
            if part in self._copied:
                # The copies have to be done before the bytes are someone else's.
                self._stream.wait()
                self._released[part] = self._copied.pop(part)
                for one in self._released[part]:
                    resize(one.storage, 0)
                    if part != "gradients":
                        self._out[one.storage._cdata] = part, one

    @torch.no_grad()
    def load(self, *parts: Part, complete: bool = True) -> None:
        """Bring parts back, bit by bit as they were; those that are there stay, and are copied
        again before they leave.

        Args:
            parts: Which.
            complete: Parameters are to be read; without, a forward pass waits for each itself.
        """
        if complete and "parameters" in parts:
            self._gather.finish()
        for part in parts:
            if self._copied.pop(part, None) is not None:
                self._stream.wait()
            if part in self._released:
                self._load(part)

    @contextlib.contextmanager
    def optimizer_readable(self) -> Iterator[None]:
        """Meanwhile the optimizer's tensors can be read and written where they are: on the device,
        or in host memory, without bringing them back. The parameters have to be there. An optimizer
        of which a copy was begun leaves the device first: what is written here is in no copy."""
        if "optimizer" in self._copied:
            self.release("optimizer")
        changed: list[tuple[Tensor, Tensor]] = []
        own = {id(parameter) for parameter in self._module.parameters()}
        try:
            for tensor in self._optimizer_tensors():
                # A parameter's hooks hang on its device.
                if id(tensor) not in own and (values := self.values(tensor)) is not None:
                    changed.append((tensor, tensor.data))
                    tensor.data = values
            yield
        finally:
            for tensor, data in changed:
                tensor.data = data

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor, complete, or its values in host memory while it is out."""
        self._gather.finish()
        values = self.values(tensor)
        return tensor if values is None else values

    def values(self, tensor: Tensor) -> Tensor | None:
        """A view of the tensor's values in host memory; ``None``: it is on the device."""
        found = self._out.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        part, one = found
        flat = self._copy_of(part, one).view(tensor.dtype)
        return flat.as_strided(
            tensor.shape, tensor.stride(), flat.storage_offset() + tensor.storage_offset()
        )

    def device_bytes(self) -> int:
        """Bytes of the device in the storages of the model, its buffers and its optimizer."""
        found = _storages(
            [t for part in PARTS for t in self._tensors(part)] + list(self._module.buffers())
        )
        return sum(storage.nbytes() for storage in found)

    def host_bytes(self) -> int:
        """Bytes of host memory that are kept for copies."""
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
        """A part's storages, less those that another part has."""
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
        """Main parameters and Adam's moments; its step, a number, stays."""
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
    """Of the tensors, each once, in order."""
    found = {one._cdata: one for one in (tensor.untyped_storage() for tensor in tensors)}
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)  # type: ignore[call-overload,no-any-return]


def resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Give a storage other memory, or none. The dry run replaces it to count."""
    storage.resize_(num_bytes)
