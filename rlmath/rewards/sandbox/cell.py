"""Runs Python as a notebook does. A script, not a module, also on remote machines.

The value of a final expression is printed unless it is ``None``, so a program that prints what it
found and one that ends with it both show it. Tracebacks begin with the first line of the code.

As a program it runs the file that it is given; ``cells.py`` calls :func:`run` in a sandbox.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import random
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

OK, ERROR, MEMORY = 0, 1, 3  # exit codes


def new_main() -> dict[str, Any]:
    """A new ``__main__``, where pickle finds what the code defines; returns its names."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    return vars(main)


def be_deterministic() -> None:
    """Seed ``random`` and, if it has been imported, ``numpy.random``."""
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)


def run(code: str, names: dict[str, Any], file: str) -> int:
    """Run code with these names; its output goes to the descriptors 1 and 2. ``file``: for
    tracebacks, such as ``<cell 1>``. Returns an exit code, see above."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    try:
        tree = ast.parse(code, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # The code does not inherit this file's `from __future__`.
        exec(compile(tree, file, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = ast.Expression(last.value)
            sys.displayhook(eval(compile(value, file, "eval", dont_inherit=True), names))
        return OK
    except SystemExit as stop:
        if stop.code in (None, 0):
            return OK
        _write(f"SystemExit: {stop.code}\n")
        return ERROR
    except BaseException as error:
        _write(_traceback(error))
        return MEMORY if isinstance(error, MemoryError) else ERROR
    finally:
        flush()


def finish() -> None:
    """End like a script: wait for the code's threads, and run its exit handlers."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    flush()


def flush() -> None:
    """Flush the code's output, even if it has replaced or closed the streams."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with contextlib.suppress(BaseException):
            stream.flush()  # type: ignore[union-attr]


def _traceback(error: BaseException) -> str:
    try:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)
        found = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        _drop_own_frames(found)
        return "".join(found.format())
    except BaseException:
        return f"{type(error).__name__}\n"


def _drop_own_frames(found: traceback.TracebackException | None) -> None:
    if found is not None:
        frames = [frame.filename for frame in found.stack]
        if frames[:1] == [_drop_own_frames.__code__.co_filename]:
            of_code = (i for i, name in enumerate(frames) if name.startswith("<cell "))
            del found.stack[: next(of_code, len(frames))]
        for other in (found.__cause__, found.__context__, *(found.exceptions or ())):
            _drop_own_frames(other)


def _write(text: str) -> None:
    flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "replace"))


def main() -> NoReturn:
    """Run the file that is named."""
    (file,) = sys.argv[1:]
    with open(file, encoding="utf-8") as opened:
        code = opened.read()
    sys.argv = [""]
    be_deterministic()
    status = run(code, new_main(), "<cell 1>")
    finish()
    os._exit(status)


if __name__ == "__main__":
    main()
