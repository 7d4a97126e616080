"""The public API, and ``docs/api.md`` from its docstrings: ``python -m toolkits.pages.api``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

API_PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
# Names that a script may import: those in ``__all__`` of these modules.
LIBRARY = (
    "rlmath.algorithms.losses",
    "rlmath.algorithms.advantages",
    "rlmath.batching",
    "rlmath.grading",
    "rlmath.rewards",
)
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
PUBLIC = ("rlmath", *LIBRARY)
_HEAD = """# Python API

Written by `python -m toolkits.pages.api` from the docstrings; change them there. How a run is
driven from Python, and examples of the library, are in [python.md](python.md); the protocols of
your own losses, filters and so on are in [extending.md](extending.md).

**This is all of the public API**: names in `__all__` of the modules below, and what the table of
[extending.md](extending.md#kinds) names. Every other module, name and attribute of `rlmath` is
internal and may change at any time.
"""


def public_names(module: str) -> list[str]:
    return sorted(importlib.import_module(module).__all__)


def api_page() -> str:
    return "\n".join([_HEAD, *(line for module in PUBLIC for line in _module(module))])


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    first = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
    yield from (f"## {name}", "", first, "")
    for public in public_names(name):
        yield from _entry(public, getattr(module, public))


def _entry(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, type) and not inspect.isfunction(value):
        return  # A constant, or the type of a function.
    if not value.__module__.startswith("rlmath.api."):
        first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        yield from (f"- `{_signature(name, value)}`: {first}", "")
        return
    yield from (f"### {name}", "", "```text", inspect.getdoc(value) or "", "```", "")
    for method, function in vars(value).items():
        found = getattr(function, "__func__", function)
        if not method.startswith("_") and inspect.isfunction(found):
            text = inspect.getdoc(found) or ""
            yield from (f"`{_signature(f'{name}.{method}', found)}`", "")
            yield from ("```text", text, "```", "")


def _signature(name: str, value: Any) -> str:
    if isinstance(value, type) and issubclass(value, Enum | Exception):
        return name
    return _ADDRESS.sub("...", f"{name}{inspect.signature(value)}".replace("'", ""))


if __name__ == "__main__":
    API_PAGE.write_text(api_page(), encoding="utf-8")
