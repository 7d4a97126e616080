"""The journal's records of samples whose arrays the driver does not get: an engine writes them, in
separate files, before it hands the samples over."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rlmath.rollout.journal import framed, new_part
from rlmath.rollout.requests import Request
from rlmath.types import Sample


class EngineJournal:
    """Of one engine's process.

    Args:
        engine: Its index.
    """

    def __init__(self, engine: int) -> None:
        # No other process appends to its files, whose last record may be cut off.
        self._ending = f"{engine}-{uuid.uuid4().hex[:8]}.bin"
        self._lock = threading.Lock()
        self._generation = 0
        self._requests: dict[tuple[str, int], Request] = {}
        self._stem, self._file = "", None  # type: tuple[str, IO[bytes] | None]

    def expect(self, generation: int, requests: Sequence[Request]) -> None:
        """Requests whose samples are to be written, those of an older generation never more."""
        with self._lock:
            if generation > self._generation:
                self._generation = generation
                self._requests.clear()
            if generation == self._generation:
                self._requests |= {one.key: one for one in requests if one.journal is not None}

    def write(self, samples: Sequence[Sample]) -> None:
        """Write those that were expected; they are in the file when this returns."""
        with self._lock:
            for sample in samples:
                request = self._requests.pop((sample.problem_id, sample.index), None)
                if request is None or request.journal is None:
                    continue
                try:
                    file = self._opened(request.journal.stem)
                    file.write(framed(request.journal.key, new_part(request, sample)))
                    file.flush()
                except OSError as error:
                    print(
                        f"warning: {request.journal.stem}: {error}; this sample is not in the "
                        "journal, and a run that dies generates it again",
                        file=sys.stderr,
                        flush=True,
                    )
                    # Behind half a record nothing is found.
                    self._stem = ""
                    self._ending = f"{sample.engine}-{uuid.uuid4().hex[:8]}.bin"

    def _opened(self, stem: str) -> IO[bytes]:
        if self._file is None or self._stem != stem:
            if self._file is not None:
                self._file.close()
            path = Path(f"{stem}.{self._ending}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stem, self._file = stem, path.open("wb")
        return self._file
