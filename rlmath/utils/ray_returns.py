"""Return values of Ray's calls that stay in the object store of the node that made them.

Ray sends a return value to the caller if it is smaller than 100 KiB and the task's values that go
to the caller are not more than ``task_rpc_inlined_bytes_limit`` together. It stores the values of a
generator one by one, as they are yielded, and looks at that limit each time. So the limit is 0
while it stores the one that is to stay, and all other values of the process go as always.
``tests/contracts/test_ray_returns.py`` holds Ray to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

LIMIT = "task_rpc_inlined_bytes_limit"
# Ray's own.
DEFAULT_BYTES = 10 * 2**20


class StayingReturns:
    """Of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._staying = 0
        # Ray takes a variable of the environment before what it is told.
        self._limit_bytes = int(os.environ.pop(f"RAY_{LIMIT}", DEFAULT_BYTES))

    def pair(self, answer: Any, stays: Any) -> Iterator[Any]:
        """The values of a call with ``num_returns=2``, of which the second stays on this node,
        however small it is. Nothing is left to fail once the first is given.

        Args:
            answer: Goes to the caller as usual.
            stays: ``None``: there is nothing to stay.
        """
        yield answer
        if stays is None:
            yield None
            return
        with self._all_stay():
            yield stays

    @contextlib.contextmanager
    def _all_stay(self) -> Iterator[None]:
        # Another call of the process may end meanwhile; its values stay too, and are fetched.
        with self._lock:
            self._staying += 1
            if self._staying == 1:
                _set_limit(0)
        try:
            yield
        finally:
            with self._lock:
                self._staying -= 1
                if not self._staying:
                    _set_limit(self._limit_bytes)


def _set_limit(size_bytes: int) -> None:
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize(json.dumps({LIMIT: size_bytes}))
