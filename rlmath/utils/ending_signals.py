"""Signals that end a run. All are handled like SIGTERM: the run saves its state and ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# A closed terminal sends SIGHUP; batch systems announce the end of a job with any of the others. An
# unhandled one would end the process immediately.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A second SIGTERM or Ctrl-C aborts the saving. The others may come twice unintentionally: when a
# terminal closes, both the kernel and the shell send SIGHUP.
_REPEATED = ENDING_SIGNALS[1:]
_PACKAGE = Path(__file__).resolve().parents[1]


def on_ending_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Install a handler for the signals; only the main thread can.

    An ignored SIGHUP stays ignored, and so do SIGUSR1 and SIGUSR2: that is how ``nohup`` lets a run
    outlive its terminal. Returns the previous handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    asked = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked or number not in _REPEATED:
            asked = True
            handler(number, frame)

    return {
        number: signal.signal(number, take)
        for number in ENDING_SIGNALS
        if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    }


def is_signal(error: BaseException) -> bool:
    """Whether a ``SystemExit`` is from a signal, raised by rlmath's handler wherever the main
    thread is; ``sys.exit`` in a user's code is an error of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, SystemExit) or not frames:
        return False
    return _PACKAGE in Path(frames[-1].filename).resolve().parents


def put_back(handlers: dict[signal.Signals, Any]) -> None:
    """Restore the handlers that :func:`on_ending_signals` replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def ending_by_exit() -> Iterator[None]:
    """Let the signals leave the block with ``SystemExit(128 + number)``."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = on_ending_signals(end)
    try:
        yield
    finally:
        put_back(before)


@contextlib.contextmanager
def signals_wait(meanwhile: str) -> Iterator[None]:
    """Delay the first ending signal, or Ctrl-C, to the end of the block; a second one takes effect
    immediately. ``meanwhile``: description of the block, for the printed line."""
    noted: list[int] = []
    before: dict[int, Handler] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            if number not in _REPEATED:
                before[number](number, frame)
            return
        noted.append(number)
        name = signal.Signals(number).name
        print(
            f"{name} during {meanwhile}: the run ends after it; a second signal ends it now",
            flush=True,
        )

    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGINT, *ENDING_SIGNALS):
            handler = signal.getsignal(one)
            if callable(handler):
                before[one] = handler
                signal.signal(one, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            before[noted[0]](noted[0], None)
