"""The source of values given in Python: whether another process can import it, and its hash."""

from __future__ import annotations

import contextlib
import dis
import hashlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlmath.plugins.source import HASH_DIGITS

_PLAIN = (int, float, str, bytes, bool, type(None))
_IN_CLASSES = (*_PLAIN, list, tuple, dict, set, FunctionType)


def import_path(value: Any) -> str | None:
    """``package.module:name`` of a function or class that another process can import; ``None`` for
    one of a script, a notebook or another function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        return None
    try:
        has_file = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        has_file = False
    return f"{module}:{name}" if has_file else None


def source_hash(value: Any) -> str:
    """The hash of a value that is sent: of the source of its functions and classes, of those that
    these use and that are sent with them, and of the data among what they use."""
    digest = hashlib.sha256()
    for text in _sources(value, set()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:HASH_DIGITS]


def source_text(value: Any) -> str:
    """The source of a function, or of an object's class, for a person; empty if there is none."""
    shown = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    try:
        return inspect.cleandoc(inspect.getsource(shown))
    except (OSError, TypeError):
        return ""


def _sources(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen or isinstance(value, ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, list | tuple):
        yield type(value).__name__
        for item in value:
            yield from _sources(item, seen)
    elif isinstance(value, set | frozenset):
        yield str(sorted(map(repr, value)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _sources(item, seen)
    elif (path := import_path(value)) is not None:
        yield path
    elif isinstance(value, FunctionType):
        yield from _of_function(value, seen)
    elif inspect.ismethod(value):
        yield from _sources(value.__func__, seen)
        yield from _sources(value.__self__, seen)
    elif isinstance(value, type):
        yield from _of_class(value, seen)
    elif hasattr(value, "tolist"):  # An array or a tensor, whose pickles differ.
        yield str(getattr(value, "dtype", ""))
        yield from _sources(value.tolist(), seen)
    else:
        yield from _of_object(value, seen)


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):  # Typed into an interpreter, or generated.
        yield from _of_code(function.__code__)
    used = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # It is not filled yet.
            used.append(cell.cell_contents)
    names = sorted(_global_names(function.__code__))
    used += [function.__globals__[name] for name in names if name in function.__globals__]
    for value in used:
        yield from _sources(value, seen)


def _of_class(kind: type, seen: set[int]) -> Iterator[str]:
    yield kind.__qualname__
    for base in kind.__bases__:
        yield from _sources(base, seen)
    for name, value in sorted(vars(kind).items()):
        if name in ("__annotations__", "__doc__"):
            yield f"{name} {value}"
        elif isinstance(value, staticmethod | classmethod):
            yield from _sources(value.__func__, seen)
        elif isinstance(value, property):
            yield from _sources([value.fget, value.fset], seen)
        elif isinstance(value, _IN_CLASSES) and name != "__module__":
            yield name
            yield from _sources(value, seen)


def _of_object(value: Any, seen: set[int]) -> Iterator[str]:
    yield from _sources(type(value), seen)
    state = getattr(value, "__dict__", None)
    own = (type(value).__reduce__, type(value).__reduce_ex__)
    if isinstance(state, dict) and own == (object.__reduce__, object.__reduce_ex__):
        yield from _sources(state, seen)
        return
    try:
        yield hashlib.sha256(pickle.dumps(value, protocol=4)).hexdigest()
    except Exception:  # The sender refuses values that cannot be pickled.
        yield type(value).__qualname__


def _of_code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        else:
            yield from _sources(constant, set())


def _global_names(code: CodeType) -> set[str]:
    names = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names
