"""Stop ranks within a pass, all at the same micro-batch, while nothing has changed yet.

A rank cannot leave a pass alone, because others wait for it in collectives. So the ranks agree on a
micro-batch that none of them has begun, and run the rest of the pass with the shortest possible
micro-batches, which take milliseconds each. The gradient is dropped.

The driver asks through the ranks' store. A thread of each rank waits there, pauses the rank before
its next micro-batch, publishes how many it has begun, and reads the others' numbers. A rank whose
optimizer has begun a step reports that it cannot stop; then none stops.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

from rlmath.errors import UpdateStopped

_ASKED, _BEGUN = "rlmath/stop", "rlmath/begun"
_LONG = timedelta(days=1)
_ANSWER_S = 5.0


class Stops:
    """A rank's side of the protocol. Micro-batches are numbered through all passes of the process,
    which are the same on all ranks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._first = self._begun = 0
        # Micro-batches from this one on are skipped.
        self._limit = math.inf
        self._is_held = self._has_stepped = False

    def connect(self, address: str, port: int, rank: int, world_size: int) -> None:
        """Start waiting for requests, in a thread. ``address``: host of the ranks' store."""
        self._reset()
        given = (_open(address, port), rank, world_size)
        threading.Thread(target=self._watch, args=given, name="stops", daemon=True).start()

    def begin_step(self) -> None:
        """Start a step, in which nothing has changed yet."""
        self._has_stepped = False

    @contextlib.contextmanager
    def running(self, micro_batches: int) -> Iterator[None]:
        """Run a pass over this number of micro-batches. Raises UpdateStopped: after the pass, if
        any was skipped."""
        try:
            yield
            if self.is_skipped(micro_batches - 1):
                raise UpdateStopped
        finally:
            self._first += micro_batches

    def skips(self, number: int) -> bool:
        """Whether the ranks skip a micro-batch of the pass that is about to begin, or that another
        stage is about to send. The answer is the same on all ranks and at all times."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            if self.is_skipped(number):
                return True
            self._begun = max(self._begun, self._first + number + 1)
            return False

    def is_skipped(self, number: int) -> bool:
        """Whether a micro-batch of the pass that has already begun is skipped."""
        return self._first + number >= self._limit

    def before_optimizer_step(self) -> None:
        """Mark that the step changes weights from here on. Raises UpdateStopped: the ranks have
        agreed to stop first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            if self._limit < math.inf:
                raise UpdateStopped
            self._has_stepped = True

    def _watch(self, store: TCPStore, rank: int, world_size: int) -> None:
        # The store ends with rank 0, which raises an error.
        with contextlib.suppress(Exception):
            while not store.check([_ASKED]):
                with contextlib.suppress(DistStoreError):  # No request within the timeout.
                    store.wait([_ASKED], _LONG)
            with self._changed:
                self._is_held = True
                own = math.inf if self._has_stepped else self._begun
            store.set(f"{_BEGUN}/{rank}", str(own))
            keys = [f"{_BEGUN}/{one}" for one in range(world_size)]
            store.wait(keys, _LONG)
            limit = max(float(text) for text in store.multi_get(keys))
            with self._changed:
                self._limit, self._is_held = limit, False
                self._changed.notify_all()


# Global to the process: a rank has several models, whose passes follow each other.
stops = Stops()


def ask_to_stop(address: str, port: int) -> None:
    """Ask the ranks with this store to stop. Raises torch.distributed.DistError: the store does not
    answer."""
    _open(address, port).set(_ASKED, "yes")


def _open(address: str, port: int) -> TCPStore:
    """A separate connection, which may block."""
    timeout = timedelta(seconds=_ANSWER_S)
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
