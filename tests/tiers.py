"""Runs the tiers of the plain command, ``python tests/tiers.py [pytest arguments]``, or what
``long`` has of each tier, ``python tests/tiers.py long [pytest arguments]``.

``fast`` has a process per core; with ``process`` it has one more, as some tests wait. Then runs
from the command line share the machine with ranks, engines and runs that are broken on purpose:
each of them waits for start-ups much of the time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading


def on_cores(more=0):
    """A process per core, and ``more``. A file's tests stay in one, with the fixtures that they
    share; tests/conftest.py has their order."""
    processes = min(len(os.sched_getaffinity(0)) + more, 8)
    return ("-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder")


IN_PARALLEL = on_cores(more=1)
# Files of e2e that share no fixture with the rest, so that two processes can have the whole.
APART = tuple(f"tests/e2e/test_{name}.py" for name in ("cluster", "train_layouts"))
# Phases one after the other; in each, runs of pytest in this order, two at a time: the longest
# first, and faults, which wait for most of their time, beside it.
PHASES = (
    (("-m", "(fast or process) and not long", *IN_PARALLEL),),
    (
        ("-m", "(distributed or engine) and not long"),
        ("-m", "faults and not long"),
        ("-m", "e2e and not long", *(f"--ignore={path}" for path in APART)),
        ("-m", "e2e and not long", *APART),
    ),
)
# The long tests of each tier, and properties on many more random cases.
MANY = "--hypothesis-profile=many"
LONG = (
    (("-m", "(fast or process) and (long or hypothesis)", MANY, *IN_PARALLEL),),
    (
        ("-m", "(distributed or engine) and (long or hypothesis)", MANY),
        ("-m", "(e2e or faults) and (long or hypothesis)", MANY),
    ),
)
AT_ONCE = 2
NO_TESTS = 5
INTERRUPTED = 130


class Run:
    """One pytest, in its own session, so that Ctrl-C reaches it once, from here.

    Args:
        arguments: Arguments of pytest.
        shown: Print its lines as they come; those of others are printed by ``show``.
    """

    def __init__(self, arguments, shown):
        self.name = " ".join(arguments[:2])
        self.lines: list[str] = []
        self.shown = shown
        color = ["--color=yes"] if sys.stdout.isatty() else []
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *arguments, *color],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self.shown:
                sys.stdout.write(line)
                sys.stdout.flush()

    def wait(self):
        """Its exit code, once all that it said is there."""
        code = self.process.wait()
        self.reader.join()
        return code

    def show(self):
        if not self.shown:
            sys.stdout.write("".join(self.lines))
            sys.stdout.flush()

    def summary(self):
        """Failures by name, and pytest's last line."""
        failed = [line for line in self.lines if "FAILED " in line or "ERROR " in line]
        last = next((line for line in reversed(self.lines) if line.strip()), "no output\n")
        by_name = [line for line in failed if "::" in line or ".py" in line]
        return [*dict.fromkeys(by_name), f"{self.name}: {last}"]


def run(phases, arguments):
    """Run them, then print one summary.

    Returns:
        0 if all passed; else pytest's code of the first that did not; 130 after Ctrl-C or SIGTERM.
    """
    done = []
    running = []
    stopped = threading.Event()

    def stop(*_):
        if not stopped.is_set():
            stopped.set()
            for one in running:
                one.process.send_signal(signal.SIGINT)

    def work(waiting):
        while not stopped.is_set():
            try:
                own, shown = waiting.get_nowait()
            except queue.Empty:
                return
            one = Run([*own, *arguments], shown)
            running.append(one)
            if stopped.is_set():  # Between the two lines above.
                one.process.send_signal(signal.SIGINT)
            done.append((one, one.wait()))
            running.remove(one)

    with _handler(stop):
        for phase in phases:
            begun = len(done)
            waiting = queue.SimpleQueue()
            for number, own in enumerate(phase):
                waiting.put((own, number == 0))
            workers = [threading.Thread(target=work, args=(waiting,)) for _ in range(AT_ONCE)]
            for thread in workers:
                thread.start()
            for thread in workers:
                thread.join()
            for one, _ in done[begun:]:
                one.show()
    print("=" * 30, "all tiers", "=" * 30)
    for one, _ in done:
        print("".join(one.summary()), end="", flush=True)
    if stopped.is_set():
        return INTERRUPTED
    codes = [code for _, code in done]
    bad = [code for code in codes if code not in (0, NO_TESTS)]
    # A choice by -k may leave some with no tests, not all.
    return bad[0] if bad else min(codes)


@contextlib.contextmanager
def _handler(stop):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    if sys.argv[1:2] == ["long"]:
        raise SystemExit(run(LONG, sys.argv[2:]))
    raise SystemExit(run(PHASES, sys.argv[1:]))
