"""Files of JSON lines, written here or by a separate process.

Turning a long step's samples into JSON and compressing them takes seconds of a core: 0.05 for a
million tokens, a quarter of it with Python's lock, which the driver wants meanwhile. A process is
sent the rows as they are, at a fortieth of that.
"""

from __future__ import annotations

import contextlib
import gzip
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlmath.monitor.files import replacing, to_json

Row = Mapping[str, Any]
# Rows that travel together.
Rows = Sequence[Row]

_LEVEL = 1
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlmath.monitor.json_lines import main; main()"
)


class ProcessDied(Exception):
    """The process that writes ended before its file was whole."""


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write a file, which appears atomically; compressed if its name ends in ``.gz``."""
    lines = (f"{to_json(row)}\n".encode("utf-8", "backslashreplace") for row in rows)
    with replacing(path) as file:
        if path.suffix != ".gz":
            file.writelines(lines)
            return
        with gzip.GzipFile(path.stem, "wb", _LEVEL, file) as packed:
            packed.writelines(lines)


class LinesProcess:
    """A process that writes files of JSON lines, one after the other. It is started for the first
    file, ends with ``close``, and sees from its input when this process has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, path: Path, batches: Iterable[Rows]) -> None:
        """See :func:`write_lines`; returns when the file is written. Raises OSError: it cannot be
        written; ProcessDied: the process was ended; the next file has another one."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, path)
            for rows in batches:
                _send(process.stdin, rows)
            _send(process.stdin, None)
            process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        except BaseException:
            self.close()  # It has half a file.
            raise
        try:
            failure: OSError | None = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if failure is not None:
            raise failure

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        process.stdout.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            import json

            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C is for the driver, which may have a step to finish.
                start_new_session=True,
            )
        return self._process

    def _death(self) -> ProcessDied:
        process = self._process
        self.close()
        code = None if process is None else process.returncode
        return ProcessDied(f"the process that writes samples ended with code {code}")


def main() -> None:
    """The process: reads a path, batches of rows and ``None`` until its input ends."""
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    while (path := _next(given)) is not None:
        failure = None
        batches = _batches(given)
        try:
            write_lines(path, (row for rows in batches for row in rows))
        except OSError as error:
            failure = error
            for _ in batches:  # Drop the rest of this file.
                pass
        pickle.dump(failure, answers)
        answers.flush()


def _send(pipe: IO[bytes], value: Any) -> None:
    pickle.dump(value, pipe, pickle.HIGHEST_PROTOCOL)


def _next(pipe: IO[bytes]) -> Any:
    """``None`` at the end of the input."""
    try:
        return pickle.load(pipe)
    except EOFError:
        return None


def _batches(pipe: IO[bytes]) -> Iterator[Rows]:
    """Batches of a file. When the input ends in it, so does this process."""
    while True:
        try:
            rows = pickle.load(pipe)
        except EOFError:
            raise SystemExit from None
        if rows is None:
            return
        yield rows
