"""Threads that nobody has to wait for, not even the interpreter."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from rlmath.utils.daemon_threads import DaemonThreads

pytestmark = pytest.mark.process

STUCK = """
import sys, threading
from rlmath.utils.daemon_threads import DaemonThreads
begun = threading.Event()
threads = DaemonThreads(2, "stuck")
threads.submit(lambda: (begun.set(), threading.Event().wait()))
assert begun.wait(10)
sys.exit(143)
"""


def test_results_and_errors_come_back_in_order_of_the_calls():
    threads = DaemonThreads(1, "few")
    done = []
    futures = [threads.submit(done.append, at) for at in range(50)]
    failed = threads.submit(lambda: 1 // 0)
    assert [one.result(10) for one in futures] == [None] * 50 and done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert threads.close(10.0)
    with pytest.raises(RuntimeError, match="few"):
        threads.submit(done.append, 51)


def test_daemon_threads_run_calls_concurrently():
    threads, all_there = DaemonThreads(3, "three"), threading.Barrier(3)
    futures = [threads.submit(all_there.wait, 10) for _ in range(6)]
    assert sorted(one.result(10) for one in futures) == [0, 0, 1, 1, 2, 2]
    assert threads.close(10.0)


def test_close_cancels_what_waits_and_leaves_behind_what_hangs():
    threads, begun, end = DaemonThreads(1, "one"), threading.Event(), threading.Event()
    hangs = threads.submit(lambda: (begun.set(), end.wait()))
    waits = threads.submit(begun.is_set)
    assert begun.wait(10)
    assert not threads.close(0.01)
    assert not hangs.done()
    with pytest.raises(CancelledError):
        waits.result(0)
    end.set()
    assert threads.close(10.0) and hangs.done()


def test_the_interpreter_ends_beside_a_call_that_does_not():
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=60).returncode == 143
