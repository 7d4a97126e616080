"""An experiment's file from settings by key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlmath.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def write_experiment(
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    head: str,
    *,
    groups: Sequence[str | Mapping[str, str]] = (),
    option: str = "--write",
) -> Path:
    """Write ``experiment/<name>.yaml`` and return its path. Raises UserError: the name is none for
    a file, or there is such a file already.

    Args:
        settings: By dotted key.
        head: Description for the first comment.
        groups: For its list of defaults.
        option: Command-line option that gives the name, for messages.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{option} {name}: give a name of letters, digits, -, _ and .")
    file = folder / "experiment" / f"{name}.yaml"
    if file.exists():
        raise UserError(f"{option} {name}: {file} exists; give another name, or remove it")
    nested: dict[str, Any] = {"defaults": list(groups)} if groups else {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)
    with file.open("x", encoding="utf-8") as out:
        out.write(f"# @package _global_\n# {head}.\n{text}")
    return file
