"""Rows of one data file as the run reads them, for checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlmath.data.files import Row, read_rows
from rlmath.errors import UserError

# Rows that are looked at in each data file; the whole file is read when the run starts.
PEEKED_ROWS = 4


def rows_of(path: str) -> Iterator[Row]:
    """The rows of a file or a data set of the hub, with its whole path in their places. Raises
    UserError: as :func:`rlmath.data.files.read_rows`, or there is no row in it."""
    row = None
    for row in read_rows([path]):
        yield dataclasses.replace(row, place=f"{path}:{row.place.rpartition(':')[2]}")
    if row is None:
        raise UserError(f"{path}: no rows in it")
