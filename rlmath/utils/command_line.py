"""Exit of a console command: errors that the user can fix become one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rlmath.errors import UserError, printable
from rlmath.utils.ending_signals import ending_by_exit

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Errors of a file system while a named file is read or written. Any other system error is a bug and
# has a traceback.
_OF_A_FILE = (errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT)


# A terminal that closed (EIO, ENXIO), a reader that left (EPIPE), a full disk under a log (ENOSPC),
# a closed stream, and a signal handler that prints while its own process prints.
_UNWRITABLE = (OSError, ValueError, RuntimeError)


class _Lasting:
    """A stream that ignores write errors: output is never worth a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Let the run outlive the reader of its output (``| tee log``, a terminal)."""
    before = sys.stdout, sys.stderr
    # A stream that was closed before Python started is None, and printing to it does nothing.
    sys.stdout, sys.stderr = (one and _Lasting(one) for one in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            if stream is not None:
                _flush_or_drop(stream)


def _flush_or_drop(stream: TextIO) -> None:
    """Drop unwritable output, or Python would fail at exit with code 120."""
    try:
        stream.flush()
    except _UNWRITABLE:
        with contextlib.suppress(*_UNWRITABLE):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != stream.fileno():
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def escape_unencodable() -> None:
    """Print characters that the output's encoding lacks as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(*_UNWRITABLE):  # It flushes.
                stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Hide Python warnings of other packages in the block, here and in new processes."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        with warnings.catch_warnings():
            if before is None:
                warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop("PYTHONWARNINGS", None)


def run_command(
    command: Callable[[list[str]], int], arguments: list[str], *, is_run: bool = False
) -> int:
    """Run a command; an error that the user can fix becomes one line and its exit code.
    ``command``: takes the arguments and returns the exit code. ``is_run``: a run that may take
    days: neither its terminal nor a signal may lose its progress."""
    escape_unencodable()
    with contextlib.ExitStack() as stack:
        if is_run:
            stack.enter_context(outliving_readers())
            stack.enter_context(ending_by_exit())
        return _run(command, arguments)


def _run(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        return command(arguments)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`rlmath ... | head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _FULL and not (error.filename and error.errno in _OF_A_FILE):
            raise
        file = f": {error.filename}" if error.filename else " for a file that was being written"
        said = f"{error.strerror}{file}; give another folder, or make room or leave to write there"
        print(f"error: {printable(said)}", file=sys.stderr)
        return EXIT_USER_ERROR
