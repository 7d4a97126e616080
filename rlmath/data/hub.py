"""Data sets of a hub among data files: ``hub:ORGANISATION/NAME:CONFIGURATION:SPLIT``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmath.errors import UserError

PREFIX = "hub:"


def is_hub(path: object) -> bool:
    """Whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


def hub_rows(path: str) -> Iterator[tuple[int, Any]]:
    """The rows of a data set, numbered from 1.

    Args:
        path: ``hub:openai/gsm8k:main:train``; the configuration may be empty or left out, the
            split is ``train`` where it is left out. A folder in the hub's form works as well.

    Raises:
        UserError: It cannot be fetched, or is not named so.
    """
    name, *rest = path.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise UserError(f"{path}: write hub:ORGANISATION/NAME:CONFIGURATION:SPLIT")
    config, split = (*rest, "", "")[:2]
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path}: the data set cannot be read ({reason}); it needs a network or a cached copy, "
            "or fetch it with toolkits/prepare_data.py on a machine that has one"
        ) from error
    yield from enumerate(rows, start=1)
