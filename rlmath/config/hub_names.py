"""How data sets of a hub are named among data files."""

from __future__ import annotations

from rlmath.errors import UserError

PREFIX = "hub:"


def is_hub(path: object) -> bool:
    """Whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


def parts_of(path: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of ``hub:ORGANIZATION/NAME:CONFIGURATION:SPLIT``.

    The configuration may be empty or left out; the split is ``train`` where it is left out. Raises
    UserError: it is not written so.
    """
    name, *rest = path.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise UserError(f"{path}: write hub:ORGANIZATION/NAME:CONFIGURATION:SPLIT")
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"
