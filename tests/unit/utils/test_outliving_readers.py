"""A run whose reader has gone (``rlmath train | tee log``) continues, and says how it ended."""

import os
import pty
import subprocess
import sys

import pytest

from rlmath.utils.command_line import _Lasting

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


def test_the_run_ends_as_it_would_have(tmp_path):
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


def closed_stream(what):
    """A stream that nothing can be written to."""
    if what == "full disk":
        return open("/dev/full", "w", encoding="utf-8")
    reader, writer = os.pipe() if what == "pipe" else pty.openpty()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("what", ["pipe", "terminal", "full disk"])
def test_a_stream_outlives_what_it_is_written_to(what):
    with pytest.raises(OSError), closed_stream(what) as stream:
        stream.write("x\n")
    stream = _Lasting(closed_stream(what))
    for _ in range(3):
        print("x" * 10_000, file=stream, flush=True)
    stream.writelines(["y"])
    stream.write("\udcff")
    stream.close = None


UNENCODABLE = """
import os, sys
from rlmath import cli
sys.argv[1] == "closed" and os.close(1)
def command(arguments):
    print("± problème \\udcff", "for", *arguments)
    return 3
cli._checked_packages = command
sys.exit(cli.main(["train"]))
"""


@pytest.mark.parametrize("where", ["ascii", "full", "closed"])
def test_the_output_of_a_run_is_never_its_end(where, tmp_path):
    with open("/dev/full" if where == "full" else tmp_path / "log", "w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-c", UNENCODABLE, where],
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
    assert (done.returncode, done.stderr) == (3, "")
    if where == "ascii":
        assert (tmp_path / "log").read_text() == "\\xb1 probl\\xe8me \\udcff for train\n"
