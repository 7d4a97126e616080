"""Samples of an unfinished evaluation, each written to disk as soon as it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlmath.rollout.group_state import with_tuples
from rlmath.types import Sample


class Journal:
    """A file with a line per sample, from which an interrupted evaluation resumes.

    A context manager. Log-probs are not written: evaluation does not use them. ``path``: created if
    missing. ``about``: identity of the samples: weights, problems, settings. A file with another
    identity is started over.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = json.loads(json.dumps(about))
        self._file: IO[bytes] | None = None
        self.samples: dict[tuple[str, int], Sample] = {}

    def __enter__(self) -> Journal:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        end = self._read() if self._path.exists() else 0
        self._file = self._path.open("r+b" if end else "wb")
        # Overwrite a line that an interruption cut off.
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write({"about": self._about})
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The samples, each written before it is yielded; not one whose environment did not work,
        which an evaluation that resumes samples again."""
        for sample in samples:
            if sample.failure is None:
                tokens = sample.token_ids.tolist()
                self._write({**vars(sample), "token_ids": tokens, "log_probs": [], "routes": None})
            yield sample

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._file is not None, "a journal is used as a context manager"
        # JSON's escapes hold half surrogates, which UTF-8 cannot.
        self._file.write(json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Load the samples of an earlier run; return where whole lines end."""
        end = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    value = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    value = None
                if value is None:
                    break
                if number == 0:
                    if value.get("about") != self._about:
                        return 0
                else:
                    for name, dtype in (("token_ids", np.int32), ("log_probs", np.float32)):
                        value[name] = np.array(value[name], dtype)
                    sample = Sample(**with_tuples(value))
                    self.samples[(sample.problem_id, sample.index)] = sample
                end += len(line)
        return end
