"""Names to functions, with an error that lists the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Functions of one kind by name.

    Args:
        setting: The setting that chooses among them, for the error message.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._known: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a function under ``name``."""

        def add(function: T) -> T:
            if name in self._known:
                raise ValueError(f"{self._setting} {name!r} is registered twice")
            self._known[name] = function
            return function

        return add

    def get(self, name: str) -> T:
        """The function called ``name``.

        Raises:
            ValueError: There is none of that name; the message lists those that there are.
        """
        if name not in self._known:
            known = ", ".join(self.names())
            raise ValueError(f"{self._setting} = {name!r} is not known; known are: {known}")
        return self._known[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._known)
