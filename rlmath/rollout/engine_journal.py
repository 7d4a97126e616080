"""The journal's records of samples whose arrays the driver does not get: an engine writes them, in
separate files, before it hands the samples over."""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rlmath.rollout.journal import framed, has_nothing_new, new_part
from rlmath.rollout.requests import JournalEntry, Request
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
        # The step of which a sample could not be written.
        self._failed_stem = ""

    def expect(self, generation: int, requests: Sequence[Request]) -> None:
        """Requests whose samples are to be written, those of an older generation never more."""
        with self._lock:
            if generation > self._generation:
                self._generation = generation
                self._requests.clear()
            if generation == self._generation:
                self._requests |= {one.key: one for one in requests if one.journal is not None}

    def write(self, samples: Sequence[Sample]) -> str:
        """Write those that were expected; they are in the file when this returns.

        Returns:
            Why it could not, at the first sample of a step, of which no others are tried: a full
            disk stays full, and behind half a record nothing is found. Else nothing.
        """
        failed = ""
        with self._lock:
            for sample in samples:
                request = self._requests.pop((sample.problem_id, sample.index), None)
                if request is None or request.journal is None or has_nothing_new(request, sample):
                    continue
                if request.journal.stem == self._failed_stem:
                    continue
                try:
                    self._write(request.journal, new_part(request, sample))
                except OSError as error:
                    failed = str(error)
                    self._failed_stem = request.journal.stem
                    self._close()
                    print(
                        f"warning: {request.journal.stem}: {failed}; further samples of this "
                        "step are not in the journal; if the run dies, it generates them again",
                        file=sys.stderr,
                        flush=True,
                    )
        return failed

    def _write(self, entry: JournalEntry, sample: Sample) -> None:
        record = framed(entry.key, sample, entry.attempt)
        file = self._opened(entry.stem)
        file.write(record)
        file.flush()

    def _opened(self, stem: str) -> IO[bytes]:
        if self._file is None or self._stem != stem:
            self._close()
            path = Path(f"{stem}.{self._ending}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stem, self._file = stem, path.open("wb")
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # What a full disk did not take.
                file.close()
