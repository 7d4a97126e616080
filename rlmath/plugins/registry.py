"""Names to functions with their options and traits, with an error that lists the names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlmath.plugins.loading import attribute_of, load
from rlmath.plugins.source import PluginError, split
from rlmath.utils.setting import Options

T = TypeVar("T")
TraitsT = TypeVar("TraitsT")


@dataclass(frozen=True)
class NoTraits:
    """Traits of a kind that declares none."""


@dataclass(frozen=True)
class _Registered(Generic[T, TraitsT]):
    value: T
    options: type[Options]
    traits: TraitsT


class Registry(Generic[T, TraitsT]):
    """Functions of one kind by name.

    A name is one that was registered, or ``file.py:function`` or ``package.module:function`` of a
    function that its file registers.

    Args:
        setting: The setting that chooses among them, for the error message.
        traits: Dataclass of what the kind declares about each of them; its defaults hold where
            nothing is declared.
        plain: A path may also name what is not registered; it has no options.
    """

    def __init__(self, setting: str, traits: type[TraitsT], *, plain: bool = False) -> None:
        self._setting, self._traits, self._plain = setting, traits, plain
        self._known: dict[str, _Registered[T, TraitsT]] = {}

    def register(
        self, name: str, options: type[Options] = Options, traits: TraitsT | None = None
    ) -> Callable[[T], T]:
        """Decorator that files a function under ``name``. Raises PluginError: the name is taken. A
        file that is imported again replaces what it had.

        Args:
            name: Its name in the settings.
            options: Settings that it takes besides its inputs; it is passed one of these.
            traits: Properties that it declares; ``None``: the kind's defaults.
        """

        def add(function: T) -> T:
            before = self._known.get(name)
            if before is not None and _module(before.value) != _module(function):
                raise PluginError(f"{self._setting} {name!r} is registered twice")
            self._known[name] = _Registered(function, options, traits or self._traits())
            return function

        return add

    def get(self, name: str) -> T:
        """The function called ``name``. Raises PluginError: no such name; the message lists the
        known ones."""
        return self._find(name).value

    def name(self, name: str) -> str:
        """The registered name of the function called ``name``, which may be a path."""
        found = self._find(name)
        return next(known for known, one in self._known.items() if one is found)

    def options(self, name: str) -> type[Options]:
        """The options of the function called ``name``; without arguments the defaults. Raises
        PluginError: there is no such name."""
        return self._find(name).options

    def traits(self, name: str) -> TraitsT:
        """Declared traits of the function called ``name``. Raises PluginError: there is no such
        name."""
        return self._find(name).traits

    def registration(self, value: T) -> tuple[str, type[Options], TraitsT] | None:
        """Name, options and traits that a function is registered with; ``None``: it is not."""
        found = ((name, one) for name, one in self._known.items() if one.value is value)
        return next(((name, one.options, one.traits) for name, one in found), None)

    def names(self) -> list[str]:
        return sorted(self._known)

    def in_order(self) -> list[str]:
        """All registered names, in the order in which they were registered."""
        return list(self._known)

    def having(self, trait: Callable[[TraitsT], Any]) -> list[str]:
        """Names of those of which ``trait`` is true, sorted."""
        return [name for name in self.names() if trait(self._known[name].traits)]

    def has(self, name: str) -> bool:
        """Whether :meth:`get` finds something."""
        return not self.problems(name)

    def problems(self, name: str) -> list[str]:
        """The message of :meth:`get`'s error, if there is one."""
        try:
            self._find(name)
        except PluginError as error:
            return [str(error)]
        return []

    def of_module(self, module: str) -> list[str]:
        """Names that a module, or one of its submodules, registered, sorted."""
        modules = {name: f"{_module(one.value)}." for name, one in self._known.items()}
        return [name for name in self.names() if modules[name].startswith(f"{module}.")]

    def remove(self, name: str) -> None:
        """Undo a registration, such as that of a test."""
        del self._known[name]

    def _find(self, name: str) -> _Registered[T, TraitsT]:
        if name in self._known:
            return self._known[name]
        place, attribute = split(name)
        if not attribute:
            known = ", ".join(self.names()) or "none"
            raise PluginError(f"{self._setting} = {name!r} is not known; known are: {known}")
        try:
            value = attribute_of(load(place), attribute)
        except PluginError as error:
            raise PluginError(f"{self._setting}={name}: {error}") from error
        for one in self._known.values():
            if one.value is value:
                return one
        if self._plain and callable(value):
            return _Registered(value, Options, self._traits())
        raise PluginError(
            f"{self._setting}={name}: {attribute} is not registered for {self._setting}; see "
            "docs/extending.md for the decorator of this kind"
        )


def _module(value: Any) -> str | None:
    return getattr(value, "__module__", None)
