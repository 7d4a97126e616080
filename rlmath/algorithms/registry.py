"""Names to functions and their options, with an error that lists the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rlmath.utils.setting import Options

T = TypeVar("T")


class Registry(Generic[T]):
    """Functions of one kind by name.

    Args:
        setting: The setting that chooses among them, for the error message.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._known: dict[str, T] = {}
        self._options: dict[str, type[Options]] = {}

    def register(self, name: str, options: type[Options] = Options) -> Callable[[T], T]:
        """Decorator that files a function under ``name``.

        Args:
            name: Its name in the settings.
            options: What it may be told besides its inputs; it is passed one of these.
        """

        def add(function: T) -> T:
            if name in self._known:
                raise ValueError(f"{self._setting} {name!r} is registered twice")
            self._known[name] = function
            self._options[name] = options
            return function

        return add

    def get(self, name: str) -> T:
        """The function called ``name``.

        Raises:
            ValueError: There is none of that name; the message lists those that there are.
        """
        self._check(name)
        return self._known[name]

    def options(self, name: str) -> type[Options]:
        """The options of the function called ``name``; without arguments the defaults.

        Raises:
            ValueError: There is none of that name.
        """
        self._check(name)
        return self._options[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._known)

    def remove(self, name: str) -> None:
        """Undo a registration, such as that of a test."""
        del self._known[name], self._options[name]

    def _check(self, name: str) -> None:
        if name not in self._known:
            known = ", ".join(self.names())
            raise ValueError(f"{self._setting} = {name!r} is not known; known are: {known}")
