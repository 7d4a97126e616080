"""Rows of one data file as the run reads them, for checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlmath.data.files import Row, read_rows
from rlmath.errors import UserError

# Rows of each data file that are checked at least, and the time for those of all files, so that
# files of up to tens of thousands of rows are checked as a whole. The run reads the others.
PEEKED_ROWS = 4
CHECK_S = 1.0


def rows_of(path: str) -> Iterator[Row]:
    """The rows of a file or a data set of the hub, with its whole path in their places. Raises
    UserError: as :func:`rlmath.data.files.read_rows`, or there is no row in it."""
    row = None
    for row in read_rows([path]):
        yield dataclasses.replace(row, place=f"{path}:{row.place.rpartition(':')[2]}")
    if row is None:
        raise UserError(f"{path}: no rows in it")
