"""Ends a run without progress, and reports what it waits for and the stacks of each process.

Everything that a run can wait for is a :class:`WatchedComponent`: its ``progress`` changes while
it makes any, and ``waiting_on`` tells what it waits for. A run is alive while any of them changes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rlmath.cluster.logs import end_of
from rlmath.cluster.processes import ProcessPlace, send_signal

# Makes a rank or an engine write the stacks of its threads to its log.
STACKS_SIGNAL = signal.SIGUSR2
# Interrupts the driver's main thread; no other program sends this signal to end a run.
END_SIGNAL = signal.SIGRTMIN
DUMP_WAIT_S = 2.0
# A main thread that has not ended by then hangs where no signal reaches it.
END_WAIT_S = 120.0
EXIT_STALLED = 70

_COLLECTIVE = re.compile(r'distributed_c10d\.py", line \d+ in (\w+)')
_IDLE_THREAD = re.compile(r"Thread 0x\w+ \(most recent call first\):\n  <no Python frame>\n")
_CALLER = re.compile(r'File "([^"]*rlmath[^"]*)", line (\d+) in (\w+)')


class Stalled(RuntimeError):
    """No progress for ``watchdog.stall_s``. The message tells what the run was waiting for."""


@dataclass(frozen=True)
class Process:
    """A process to take stacks of: its name, log and place."""

    name: str
    log_path: str
    place: ProcessPlace | None


@dataclass(frozen=True)
class WatchedComponent:
    progress: Callable[[], Hashable]  # A value that changes whenever the component makes progress.
    # One line for each thing that it waits for; none when idle.
    waiting_on: Callable[[], Sequence[str]]
    processes: Callable[[], Sequence[Process]] = tuple


def write_stacks_on_signal() -> None:
    """Have this process write its threads' stacks to its output on ``STACKS_SIGNAL``."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)


@contextlib.contextmanager
def watch_progress(stall_s: float | None, components: Sequence[WatchedComponent]) -> Iterator[None]:
    """Watch a block in the main thread. Raises Stalled in the block, wherever it is.

    Args:
        stall_s: Seconds without progress of any component after which the run counts as stalled;
            ``None``: no limit.
        components: Components that the run can wait for.
    """
    if stall_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    found: list[str] = []

    def end(number: int, frame: FrameType | None) -> None:
        # The one exception that Ray lets through from a handler while it waits.
        raise KeyboardInterrupt

    before = signal.signal(END_SIGNAL, end)
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(stall_s, components, found, over), name="watchdog", daemon=True
    )
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if found:
            raise Stalled(found[0]) from None
        raise
    finally:
        over.set()
        signal.signal(END_SIGNAL, before)


def _watch(
    stall_s: float, components: Sequence[WatchedComponent], found: list[str], over: threading.Event
) -> None:
    last, since = _progress(components), time.monotonic()
    while not over.wait(min(stall_s / 10, 10.0)):
        now = _progress(components)
        if now != last:
            last, since = now, time.monotonic()
            continue
        quiet_s = time.monotonic() - since
        if quiet_s < stall_s:
            continue
        waits = [line for component in components for line in component.waiting_on()]
        found.append(
            f"No progress for {quiet_s:.0f} s (watchdog.stall_s={stall_s:g}). Waiting on:"
            + "".join(f"\n  - {line}" for line in waits or ["unknown"])
        )
        print(found[0], file=sys.stderr, flush=True)
        try:
            print(stacks_of(components), file=sys.stderr, flush=True)
        except Exception as error:  # The stall ends the run, with or without them.
            print(f"no stacks: {error!r}", file=sys.stderr, flush=True)
        if over.is_set():
            return
        os.kill(os.getpid(), END_SIGNAL)
        if not over.wait(END_WAIT_S):
            print("the main thread cannot be interrupted; ending", file=sys.stderr, flush=True)
            os._exit(EXIT_STALLED)  # Ray's processes end with the driver.
        return


def _progress(components: Sequence[WatchedComponent]) -> list[Hashable]:
    """The progress of each component; the error's name where it fails, as on a shared disk."""
    found: list[Hashable] = []
    for component in components:
        try:
            found.append(component.progress())
        except Exception as error:
            found.append(type(error).__name__)
    return found


def stacks_of(components: Sequence[WatchedComponent]) -> str:
    """The stacks of the driver's threads and of the components' processes."""
    lines = ["--- stacks of the driver"]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [text.rstrip() for text in traceback.format_stack(frame)[-8:]]
    processes = [process for component in components for process in component.processes()]
    sizes = [_size(process.log_path) for process in processes]
    places = [process.place for process in processes if process.place is not None]
    send_signal(places, STACKS_SIGNAL)
    time.sleep(DUMP_WAIT_S)
    for process, size in zip(processes, sizes, strict=True):
        lines.append(f"--- stacks of {process.name}")
        if process.place is None:
            lines.append("its process has ended" + end_of(process.log_path))
            continue
        dump = _IDLE_THREAD.sub("", _after(process.log_path, size))
        collective = _COLLECTIVE.search(dump)
        if collective:
            rest = _CALLER.search(dump, collective.end())
            caller = f", called from {rest[1]}:{rest[2]} ({rest[3]})" if rest else ""
            lines.append(f"{process.name} is in the collective {collective[1]}{caller}")
        lines.append(dump.rstrip() or "no stack: the process is stopped, or on another node")
    return "\n".join(lines)


def _size(path: str) -> int:
    return Path(path).stat().st_size if Path(path).exists() else 0


def _after(path: str, offset: int) -> str:
    if not Path(path).exists():
        return ""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
