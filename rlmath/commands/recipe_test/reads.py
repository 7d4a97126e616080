"""The settings that a run has read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from rlmath.config.schema import Config
from rlmath.config.settings import by_key, value_of

# Sections that an experiment may have for rlmath sft and rlmath evaluate.
_OF_OTHER_COMMANDS = ("sft.", "eval.")
# Only what the model's folder is compared with, before a run.
_OF_CHECKS = ("model.architecture",)
_PACKAGE = Path(__file__).resolve().parents[2]
# Who looks at every setting does not use it: what checks, copies, saves and shows settings.
_LOOKS_AT_ALL = (
    *(str(_PACKAGE / name) for name in ("checks", "config/load.py", "config/settings.py")),
    dataclasses.__file__,
    "<string>",  # What dataclasses generates, such as __repr__.
)


def watch_reads(config: Config) -> set[str]:
    """Note which settings are read from now on.

    A section that goes to another process whole, such as the optimizer's to the ranks, counts as
    read. ``config``: its sections are changed in place, to classes that note what is read. Returns
    Keys of the settings, growing.
    """
    reads: set[str] = set()
    _watch(config, "", reads)
    return reads


def unread(config: Config, reads: set[str], changed: set[str]) -> list[str]:
    """Settings with another value than the default that nobody has read."""
    return [
        key
        for key, one in by_key().items()
        if key not in reads | changed
        and "[]" not in key
        and not key.startswith(_OF_OTHER_COMMANDS)
        and key not in _OF_CHECKS
        and value_of(config, key) != one.default
    ]


def _watch(section: Any, prefix: str, reads: set[str]) -> None:
    own = {field.name for field in dataclasses.fields(section)}
    kind: Any = type(section)

    def get(self: Any, name: str) -> Any:
        if name in own and not sys._getframe(1).f_code.co_filename.startswith(_LOOKS_AT_ALL):
            reads.add(prefix + name)
        return kind.__getattribute__(self, name)

    def reduce(self: Any, protocol: Any) -> Any:
        reads.update(prefix + name for name in own)
        values = {name: kind.__getattribute__(self, name) for name in own}
        return _plain, (kind, values)

    for name in own:
        inner = getattr(section, name)
        if dataclasses.is_dataclass(inner):
            _watch(inner, f"{prefix}{name}.", reads)
    watched = type(kind.__name__, (kind,), {"__getattribute__": get, "__reduce_ex__": reduce})
    section.__class__ = watched


def _plain(kind: type, values: dict[str, Any]) -> Any:
    return kind(**values)
