"""How a console command ends: errors that the user can fix become one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rlmath.errors import UserError, printable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# What a disk says of a file that it names, or while one is written. Any other error of the system
# is a bug, and has a traceback.
_OF_A_FILE = (errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Lasting:
    """A stream that outlives its reader: what is written afterwards is lost, and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _to_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Meanwhile the run outlives whoever reads its output (``| tee log``, a terminal)."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Lasting(before[0]), _Lasting(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def run_command(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command; an error that the user can fix becomes one line and exit code 2."""
    try:
        return command(arguments)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`rlmath ... | head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _FULL and not (error.filename and error.errno in _OF_A_FILE):
            raise
        file = f": {error.filename}" if error.filename else " for a file that was being written"
        said = f"{error.strerror}{file}; give another folder, or make room or leave to write there"
        print(f"error: {printable(said)}", file=sys.stderr)
        return EXIT_USER_ERROR
