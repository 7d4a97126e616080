"""Stub ranks and engines in two Ray actors, so that 512 of each fit on two cores.

Every call of a stub is a call of Ray's, to an actor of another process, with what it carries. Only
the process is shared: a process for each would take more memory than a machine has. What a stub is
given and answers is counted where it arrives, so that counting costs the driver nothing.
"""

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ray


@dataclass
class Traffic:
    """Calls and bytes of a host's stubs, by method.

    Attributes:
        calls: Calls of all stubs.
        given: Bytes of the arguments, objects of the object store included.
        answered: Bytes of the results.
    """

    calls: Counter[str] = field(default_factory=Counter)
    given: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)


class Host:
    """Holds stubs. A Ray actor that does one call after the other."""

    def __init__(self, kind):
        self._kind = kind
        self.clear()

    def clear(self):
        """Forget all stubs."""
        self._stubs: dict[int, Any] = {}
        self._world = self._kind.world()
        self._traffic = Traffic()

    def make(self, index, *arguments):
        """A stub, as an actor would be made."""
        self._stubs[index] = self._kind(self._world, *arguments)

    def call(self, index, method, *arguments):
        """A call of a stub's method."""
        self._traffic.calls[method] += 1
        self._traffic.given[method] += len(pickle.dumps(arguments, 5))
        found = getattr(self._stubs[index], method)(*arguments)
        if isinstance(found, Iterator):
            return self._count(method, found)
        self._traffic.answered[method] += len(pickle.dumps(found, 5))
        return found

    def _count(self, method, values):
        """Values that Ray takes one by one."""
        for value in values:
            self._traffic.answered[method] += len(pickle.dumps(value, 5))
            yield value

    def take_traffic(self):
        """Since the last call."""
        found, self._traffic = self._traffic, Traffic()
        return found


@dataclass(frozen=True)
class Handle:
    """A stub, for those who have its handle: called as a Ray actor is."""

    host: Any
    index: int

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self, name)


@dataclass(frozen=True)
class Method:
    handle: Handle
    name: str
    num_returns: int = 1

    def options(self, num_returns):
        """The method with several results."""
        return replace(self, num_returns=num_returns)

    def remote(self, *arguments):
        """Call it; the results' references."""
        call = self.handle.host.call
        if self.num_returns > 1:
            call = call.options(num_returns=self.num_returns)
        return call.remote(self.handle.index, self.name, *arguments)


class StubRay:
    """Ray, with actors made on a host.

    Args:
        kind: Class of the stubs, with a ``world`` that the stubs of a host share.

    Attributes:
        waited: References that the driver gave to ``wait``.
    """

    def __init__(self, kind):
        self.host = ray.remote(Host).options(num_cpus=0).remote(kind)
        self._made = self.waited = 0

    def clear(self):
        """Forget all stubs: another run begins."""
        ray.get(self.host.clear.remote())
        self._made = self.waited = 0

    def remote(self, actor):
        """In place of ``ray.remote``."""
        return _Maker(self)

    def make(self, *arguments):
        # A copy: several handles in one message take as much as those of several actors.
        handle = Handle(pickle.loads(ray.cloudpickle.dumps(self.host)), self._made)
        self._made += 1
        self.host.make.remote(handle.index, *arguments)
        return handle

    def wait(self, refs, **options):
        """``ray.wait``, counted."""
        self.waited += len(refs)
        done, left = ray.wait(refs, **options)
        return done, left

    def take_traffic(self):
        """Traffic of its stubs since the last call."""
        found = ray.get(self.host.take_traffic.remote())
        return found

    def __getattr__(self, name):
        return getattr(ray, name)


@dataclass(frozen=True)
class _Maker:
    ray: StubRay

    def options(self, **_):
        return self

    def remote(self, *arguments):
        return self.ray.make(*arguments)
