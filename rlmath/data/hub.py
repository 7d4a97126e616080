"""The rows of data sets of a hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmath.config.hub_names import parts_of
from rlmath.errors import UserError


def hub_rows(path: str) -> Iterator[tuple[int, Any]]:
    """The rows of a data set, numbered from 1. Raises UserError: it cannot be fetched, or is not
    named so."""
    name, config, split = parts_of(path)
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path}: the data set cannot be read ({reason}); it needs a network or a cached copy, "
            "or fetch it with toolkits/prepare_data.py on a machine that has one"
        ) from error
    yield from enumerate(rows, start=1)
