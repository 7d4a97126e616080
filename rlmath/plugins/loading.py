"""Imports a user's code, the same in each process of a run.

The driver imports it while it reads the settings. Ranks, engines and grading actors are Ray's
processes; each calls :func:`setup_hook`'s function before anything else, which imports the same
modules in the same order. Processes that those start themselves (vLLM's workers, workers that
grade) import them from a variable of their environment, see :func:`environment`. A file travels by
value, so it need not be on other nodes, and a change of it during a run has no effect. A package
has to be installed on each node.
"""

from __future__ import annotations

import base64
import importlib
import json
import linecache
import os
import shlex
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlmath.plugins.source import PluginError, file_of, hash_of, hashes, is_file
from rlmath.utils.ending_signals import is_signal


@dataclass(frozen=True)
class Source:
    """Data that another process needs to import a place."""

    place: str  # As in the settings.
    module: str  # Its name in sys.modules.
    # Path of a source file, for tracebacks; None: a module on Python's path.
    file: str | None = None
    text: str = ""  # Content of the file.


# Has the sources for processes that are started without Ray, and the most that Linux lets it have.
VARIABLE, _MOST_CHARACTERS = "RLMATH_PLUGINS", 2**17 - 1024

# Imported places in order; those of them that other processes import too; and why a place could not
# be imported.
_imported: dict[str, Source] = {}
_everywhere: dict[str, None] = {}
_failed: dict[str, str] = {}


def load(place: str) -> ModuleType:
    """The module at a place, imported if it is not yet. Raises PluginError: it does not exist, or
    raised while it was imported."""
    if place in _failed:
        raise PluginError(_failed[place])
    if place not in _imported:
        _import(_source(place))
    return sys.modules[_imported[place].module]


def refresh(place: str) -> ModuleType:
    """:func:`load`, and import a file again that has changed since: for the start of a run in a
    process that has had one before. In this process alone, see :func:`use`. Raises PluginError: as
    in :func:`load`."""
    _failed.pop(place, None)
    if is_file(place) and place in _imported:
        now = _source(place)
        if now != _imported[place]:
            _import(now)
    return load(place)


def use(place: str) -> ModuleType:
    """:func:`refresh`, here and in each other process that this one's Ray starts from now on.
    Raises PluginError: as in :func:`load`."""
    module = refresh(place)
    _everywhere[place] = None
    return module


def attribute_of(module: ModuleType, attribute: str) -> Any:
    """A module's attribute, which may have dots. Raises PluginError: there is none; the message
    lists the module's functions."""
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(_public(module)) or "no function"
            raise PluginError(f"the module has no {attribute!r}; it has: {names}")
        found = getattr(found, part)
    return found


def public_functions(module: ModuleType) -> list[str]:
    return [name for name in _public(module) if not isinstance(getattr(module, name), type)]


def _public(module: ModuleType) -> list[str]:
    """Names of the functions and classes that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def setup_hook() -> Callable[[], None] | None:
    """Function that each other process calls first; ``None``: there is nothing to import."""
    found = sources()
    if not found:
        return None

    def import_plugins() -> None:
        from rlmath.plugins.loading import receive

        receive(found)

    return import_plugins


def sources() -> tuple[Source, ...]:
    """Places that other processes import, in order; for :func:`receive`."""
    return tuple(_imported[place] for place in _everywhere if place in _imported)


def environment() -> dict[str, str]:
    """The variable from which :func:`import_from_environment` imports; none if there is nothing.
    Raises PluginError: the files are too long for it."""
    found = sources()
    if not found:
        return {}
    plain = json.dumps([asdict(one) for one in found])
    text = base64.b64encode(zlib.compress(plain.encode())).decode()
    if len(text) > _MOST_CHARACTERS:
        raise PluginError(
            f"plugins: the files have {len(plain):,} characters, which do not fit the environment "
            f"of a process ({len(text):,} of {_MOST_CHARACTERS:,} compressed); install them as a "
            "package, which travels by name"
        )
    return {VARIABLE: text}


def import_from_environment() -> None:
    """:func:`receive` the sources of :func:`environment`, if this process was given any."""
    text = os.environ.get(VARIABLE)
    if text:
        plain = json.loads(zlib.decompress(base64.b64decode(text)))
        receive(tuple(Source(**one) for one in plain))


def receive(sources: tuple[Source, ...]) -> None:
    """Import what another process has imported. What fails is raised where it is asked for: a
    process that ends before it is connected could not say why."""
    for source in sources:
        _everywhere[source.place] = None
        if _imported.get(source.place) == source:
            continue
        try:
            _import(source)
        except PluginError as error:
            _failed[source.place] = str(error)


@dataclass(frozen=True)
class Imported:
    failed: tuple[str, ...]  # A message for each that could not be imported.
    hashes: dict[str, str]  # Hashes of the source files of the others, by name.


def imported_plugins() -> Imported:
    """The plug-ins that this process imported."""
    found: dict[str, str] = {}
    for place in _everywhere:
        source = _imported.get(place)
        if source is not None and source.file is not None:
            found[place] = hash_of(source.text.encode())
        elif source is not None:
            found |= hashes(place)
    return Imported(tuple(_failed.values()), found)


def _source(place: str) -> Source:
    if not is_file(place):
        return Source(place, place)
    file = file_of(place)
    if not file.is_file():
        raise PluginError(f"{place}: no such file (looked at {file})")
    name = f"rlmath_plugin_{file.stem}_{hash_of(str(file).encode())}"
    return Source(place, name, str(file), file.read_text(encoding="utf-8"))


def _import(source: Source) -> None:
    if source.file is None:
        _import_module(source.module)
    else:
        _run_file(source, Path(source.file))
    _imported[source.place] = source
    _failed.pop(source.place, None)


def _import_module(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module + ".").startswith(error.name + "."):
            raise PluginError(
                f"no module {module!r} on Python's path; put its folder on PYTHONPATH, or give "
                "the file: path/to/file.py:function"
            ) from error
        raise PluginError(
            f"{module} was found, but it needs the package {error.name!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        if is_signal(error):
            raise
        raise PluginError(f"{type(error).__name__} while importing {module}: {error}") from error


def _run_file(source: Source, file: Path) -> None:
    module = ModuleType(source.module)
    module.__file__ = str(file)
    # Dataclasses and pickle look their module up by name; tracebacks look up its lines.
    before = sys.modules.get(source.module)
    sys.modules[source.module] = module
    lines = source.text.splitlines(keepends=True)
    linecache.cache[str(file)] = (len(source.text), None, lines, str(file))
    try:
        exec(compile(source.text, str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[source.module]
        if before is not None:
            sys.modules[source.module] = before
        if is_signal(error):
            raise
        raise PluginError(
            f"{source.place}: {type(error).__name__} while loading it: {error}"
            f"{_beside(file, error)}"
        ) from error


def _beside(file: Path, error: BaseException) -> str:
    """How to import modules from the folder of a file, like a script can."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    name = (missing or "").partition(".")[0]
    if not name or not any((file.parent / one).exists() for one in (f"{name}.py", name)):
        return ""
    return (
        f"; {name} is beside the file, whose folder is not on Python's path: start with "
        f"PYTHONPATH={shlex.quote(str(file.parent))}"
    )
