"""A run whose reader has gone (``rlmath train | tee log``) continues, and says how it ended."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, time
from rlmath.utils.command_line import outliving_readers, run_command

def command(arguments):
    with outliving_readers():
        print("ready", flush=True)
        sys.stdin.readline()  # The reader has gone by now.
        for _ in range(3):
            print("x" * 100_000, flush=True)
            print("y" * 100_000, file=sys.stderr, flush=True)
        sys.stdout.write("no newline")
        assert sys.stdout.isatty() is False and sys.stdout.encoding
    open(arguments[0], "w").write("whole")
    return 7

sys.exit(run_command(command, sys.argv[1:]))
"""


def test_the_run_ends_as_it_would_have(tmp_path) -> None:
    done = tmp_path / "done"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(60) == 7
    assert done.read_text() == "whole"
