"""Data sources: training problems that come from a user's code and not from files.

``data.source`` names one. It is made from its options, in the driver, and more than once: for a
look at its first rows before the run, and again when a run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rlmath.plugins import NoTraits, Registry


class DataSource(Protocol):
    """A finite or endless series of rows.

    A row is a mapping as in a file, with JSON values; ``data.prompt_key`` and
    ``data.answer_key`` name its fields. A field ``id`` names its problem, for metrics, the report
    and a curriculum; otherwise rows are numbered.
    """

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The rows from the current position. When they end, it is called again for the next
        epoch, from the first row."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last row that was given, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; called before the first row."""
        ...


DATA_SOURCES: Registry[Callable[[Any], DataSource], NoTraits] = Registry("data.source", NoTraits)
