"""Signals that end a run. Each takes the way of SIGTERM: the run saves what it can and ends."""

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

# A terminal that closes sends SIGHUP; batch systems announce the end of a job with any of the
# others. An unhandled one would end the process at once.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A second SIGTERM or Ctrl-C ends the saving. The others come twice without anybody's intent: of a
# terminal that closes, the kernel and the shell both tell the run.
_REPEATED = ENDING_SIGNALS[1:]
_PACKAGE = Path(__file__).resolve().parents[1]


def on_ending_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Install a handler for the signals; only in the main thread, which alone may do so.

    A SIGHUP that is ignored stays ignored, as do SIGUSR1 and SIGUSR2: that is how ``nohup`` asks a
    run to outlive its terminal.

    Returns:
        The handlers that it replaces.
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
    """Whether a ``SystemExit`` is that of a signal, which rlmath's own handler raises wherever the
    main thread is; ``sys.exit`` in a user's code is an error of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, SystemExit) or not frames:
        return False
    return _PACKAGE in Path(frames[-1].filename).resolve().parents


def put_back(handlers: dict[signal.Signals, Any]) -> None:
    """Install the handlers that :func:`on_ending_signals` replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def ending_by_exit() -> Iterator[None]:
    """Let the signals unwind the block with ``SystemExit(128 + number)``."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = on_ending_signals(end)
    try:
        yield
    finally:
        put_back(before)


@contextlib.contextmanager
def signals_wait(meanwhile: str) -> Iterator[None]:
    """Let the first signal that ends a run, or Ctrl-C, take effect at the end of this block; a
    second one does so at once.

    Args:
        meanwhile: What the block does, for the line that is printed.
    """
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
