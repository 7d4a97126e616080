"""One line of a notebook's output that is replaced."""

from __future__ import annotations

from typing import Any


class NotebookLine:
    """A line in the cell that runs; the next cell that runs has its own."""

    def __init__(self) -> None:
        self._cell: int | None = None
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython import get_ipython
        from IPython.display import display

        content = {"text/plain": text}
        cell = get_ipython().execution_count
        if self._handle is None or cell != self._cell:
            self._cell, self._handle = cell, display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
