"""How a console command ends: errors that the user can fix become one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from rlmath.errors import UserError, printable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# What a disk says of a file that it names, or while one is written. Any other error of the system
# is a bug, and has a traceback.
_OF_A_FILE = (errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
