"""CUDA's streams, events and allocator, played on CPU or meta tensors, with a detector of races.

Every operation on a tensor is noted with the stream that was current, and with a vector clock of
what is known to have happened before it, through events, waits and synchronizations. Two operations
on one piece of memory, at least one of which writes, have to be ordered by that. Memory that is
dropped goes back to the stream that allocated it and is given out again at once, as CUDA's caching
allocator does, which is where a missing wait for a reader shows.

Only the thread that made it is looked at: others stand for other processes.
"""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Clock = dict[str, int]


class Stream:
    def __init__(self, cuda, label):
        self._cuda, self.label = cuda, label
        self.clock: Clock = {}

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        if self._cuda.is_here:
            _merge(self.clock, event)

    def record_event(self, event=None):
        return dict(self.clock)

    def synchronize(self):
        if self._cuda.is_here:
            _merge(self._cuda.host, self.clock)


class FakeCuda:
    """One process's GPU.

    Attributes:
        races: Races found: operation, stream and what it was not ordered after.
        host: Operations that the host has waited for.
    """

    def __init__(self):
        self.default = Stream(self, "default")
        self.streams = [self.default]
        self.host: Clock = {}
        self.races: list[str] = []
        self._here = threading.local()
        self._thread = threading.get_ident()
        self._comm = Stream(self, "nccl")

    @property
    def is_here(self):
        return threading.get_ident() == self._thread

    @property
    def current(self):
        found = getattr(self._here, "stream", self.default)
        return found

    def new_stream(self, *_, **__):
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def set_stream(self, stream):
        self._here.stream = stream

    def synchronize(self, *_):
        for stream in (*self.streams, self._comm):
            stream.synchronize()

    def tick(self):
        """An operation is queued on the current stream: its clock."""
        stream = self.current
        _merge(stream.clock, self.host)
        stream.clock[stream.label] = stream.clock.get(stream.label, 0) + 1
        return dict(stream.clock)

    def collective(self, *_, **__):
        """As NCCL does one: on its own stream, after the current one."""
        self._comm.wait_stream(self.current)
        with self.stream(self._comm):
            self.tick()
        return Work(self, self._comm.record_event())

    def install(self, patch, device):
        """Answer torch's CUDA calls; ``device`` takes the place of ``cuda``."""
        cuda = torch.cuda
        patch.setattr(cuda, "Stream", self.new_stream)
        patch.setattr(cuda, "current_stream", lambda *_: self.current)
        patch.setattr(cuda, "stream", self.stream)
        patch.setattr(cuda, "synchronize", self.synchronize)
        patch.setattr(cuda, "ipc_collect", lambda: None)
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "get_device_properties", lambda *_: _Properties)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "synchronize", self.synchronize)
        empty = torch.empty

        def on_device(*size, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = device
            return empty(*size, **options)

        patch.setattr(torch, "empty", on_device)

    def install_messages(self, patch):
        """Play broadcasts, and messages in batches. One by one NCCL opens a communicator for each
        pair of ranks, so there are none of those."""

        def batch(operations):
            assert operations, "NCCL refuses a batch of nothing"
            return [self.collective()]

        patch.setattr(dist, "broadcast", self.collective)
        patch.setattr(dist, "P2POp", lambda _, tensor, *__: SimpleNamespace(tensor=tensor))
        patch.setattr(dist, "batch_isend_irecv", batch)


class _Properties:
    uuid = "GPU-0"


class Work:
    """A message on its way; the current stream waits for it."""

    def __init__(self, cuda, done):
        self._cuda, self._done = cuda, done

    def wait(self):
        self._cuda.current.wait_event(self._done)


class Races(TorchDispatchMode):
    """Notes every operation of the block, and what it reads and writes."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda
        self._slots: dict[int, int] = {}
        self._free: dict[tuple[str, int], list[int]] = {}
        self._written: dict[int, Clock] = {}
        self._read: dict[int, list[Clock]] = {}
        self._count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        schema, name = function._schema, str(function)
        if schema.is_mutable or not any(a.alias_info for a in schema.arguments):
            self._note(name, schema, args, kwargs, out)
        return out

    def _note(self, name, schema, args, kwargs, out):
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        mutable = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        reads = {self._slot(t) for k in given.keys() - mutable for t in _tensors(given[k])}
        writes = {self._slot(t) for k in mutable & given.keys() for t in _tensors(given[k])}
        if not mutable and "empty" not in name:
            writes |= {self._slot(t) for t in _tensors(out)}
        elif not mutable:
            for tensor in _tensors(out):
                self._slot(tensor)
            return
        clock = self._cuda.tick()
        for slot in reads:
            self._check_order(name, slot, clock, self._written.get(slot))
            self._read.setdefault(slot, []).append(clock)
        for slot in writes:
            for before in (self._written.get(slot), *self._read.get(slot, [])):
                self._check_order(name, slot, clock, before)
            self._written[slot], self._read[slot] = clock, []

    def _check_order(self, name, slot, clock, before):
        if before is not None and any(clock.get(k, 0) < v for k, v in before.items()):
            self._cuda.races.append(f"{name} on {self._cuda.current.label}, memory {slot}")

    def _slot(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._slots:
            pool = self._free.setdefault((self._cuda.current.label, storage.nbytes()), [])
            if not pool:
                self._count += 1
                pool.append(self._count)
            self._slots[key] = pool.pop()
            weakref.finalize(storage, self._give_back, key, pool)
        return self._slots[key]

    def _give_back(self, key, pool):
        pool.append(self._slots.pop(key))


class LiveBytes(TorchDispatchMode):
    """Bytes of storages of one device that are alive, and the most there were.

    Args:
        device: ``cpu`` or ``meta``.
    """

    def __init__(self, device):
        super().__init__()
        self._device = device
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        # A view's storage was there before, perhaps from before this block.
        if not any(a.alias_info for a in function._schema.arguments):
            for tensor in _tensors(out):
                self._add(tensor)
        return out

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == self._device and key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key):
        self.live -= self._sizes.pop(key)


def _tensors(value):
    return (t for t in tree_iter(value) if isinstance(t, torch.Tensor))


def _merge(into, other):
    for label, count in other.items():
        into[label] = max(into.get(label, 0), count)
