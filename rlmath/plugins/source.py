"""The place of a user's code, and the hashes of its source files."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rlmath.errors import ConfigError

HASH_DIGITS = 12


class PluginError(ConfigError, ValueError):
    """A user's file, package or function that is not there or cannot be used."""


def is_path(name: str) -> bool:
    """Whether ``name`` is a file path or an import path and not a registered name."""
    return ":" in name or name.endswith(".py") or "." in name


def split(name: str) -> tuple[str, str]:
    """The place and the attribute of ``place:attribute``; the attribute is empty for a place.

    A place is a file (``path/to/file.py``) or a module (``my_pkg.losses``).
    """
    place, _, attribute = name.rpartition(":")
    return (place, attribute) if place else (name, "")


def is_file(place: str) -> bool:
    """Whether a place is a file and not a module."""
    return place.endswith(".py")


def file_of(place: str) -> Path:
    return Path(place).expanduser().resolve()


def hash_of(content: bytes) -> str:
    """Hash of a source file in ``config.yaml``."""
    return hashlib.sha256(content).hexdigest()[:HASH_DIGITS]


def hashes(place: str) -> dict[str, str]:
    """The hash of each source file of a place, by name; empty for one that is not there.

    A file has its own name as it was given. A module has all Python files of its top package, named
    from the package on (``my_pkg/losses.py``); rlmath itself has none, as a run names its version.
    """
    if is_file(place):
        file = file_of(place)
        return {place: hash_of(file.read_bytes())} if file.is_file() else {}
    top = place.partition(".")[0]
    if top == "rlmath":
        return {}
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # Of __main__, which is in no file that another process could import.
        spec = None
    if spec is None:
        return {}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {f"{top}/{one.relative_to(at)}": one for at in folders for one in at.rglob("*.py")}
    if not folders and spec.origin is not None:
        files[Path(spec.origin).name] = Path(spec.origin)
    return {name: hash_of(file.read_bytes()) for name, file in sorted(files.items())}
