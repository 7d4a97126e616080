"""Output of ranks and engines: a file for each, whose end is shown when the process fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlmath.utils.command_line import escape_unencodable

TAIL_LINES = 25
LINE_LENGTH = 400


def send_output_to(path: str) -> None:
    """Redirect the output of this process and its future children to a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    escape_unencodable()


def end_of(path: str) -> str:
    """The last lines of a log, framed for the end of an error message."""
    log = Path(path)
    if not log.exists():
        return f"\n(its output is in {log} on the machine where it ran)"
    # vLLM writes whole batches into one line when it fails.
    lines = [
        line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " ..."
        for line in log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    ]
    return "\n".join([f"\n--- end of {log}", *lines, "---"])
