"""The settings of the schema as a flat list: key, type, default and documentation of each.

Read from the fields, see ``rlmath/utils/setting.py``, so that error messages, checks and
``docs/settings.md`` say what the schema says.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import MISSING

from rlmath.config.schema import Config
from rlmath.utils.setting import NotWith, OnlyWith, Range, about


@dataclass(frozen=True)
class Setting:
    # As on the command line: actor.optimizer.lr; fields of list items are written
    # reward.items[].name.
    key: str
    type: Any  # The annotation, without None.
    optional: bool  # Whether null is allowed.
    default: Any  # MISSING when it has to be given.
    doc: str
    limits: Range
    only_with: OnlyWith | None  # When it is used; its setting is a full key.
    not_with: tuple[NotWith, ...]  # Values of other settings that it does not work with.
    common: bool  # One of the settings that most users change.

    @property
    def choices(self) -> list[str]:
        """Names of an enumeration's members; empty for any other type."""
        if isinstance(self.type, type) and issubclass(self.type, Enum):
            return [member.name for member in self.type]
        return []

    @property
    def type_text(self) -> str:
        text = "one of " + ", ".join(self.choices) if self.choices else _type_in_words(self.type)
        return text + (" or null" if self.optional else "")

    @property
    def default_text(self) -> str:
        """The default as it would stand in a YAML file."""
        return value_text(self.default)


def value_text(value: Any) -> str:
    if value is MISSING:
        return "has to be given"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
    if dataclasses.is_dataclass(value):
        shown = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return value_text(shown)
    return str(value)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting of :class:`rlmath.config.schema.Config`, in the schema's order."""
    return tuple(settings_of(Config, ""))


@cache
def by_key() -> dict[str, Setting]:
    return {setting.key: setting for setting in settings()}


@cache
def sections() -> tuple[str, ...]:
    """Keys that hold settings and are none themselves: ``actor``, ``actor.optimizer``, ..."""
    found: dict[str, None] = {}
    for setting in settings():
        parts = setting.key.split("[]")[0].split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])] = None
    return tuple(found)


def value_of(config: Any, key: str) -> Any:
    """The value of a setting without ``[]``."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def replace_values(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of settings, or of a section, with other values by key."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    sections = {name: replace_values(getattr(config, name), more) for name, more in inner.items()}
    return dataclasses.replace(config, **own, **sections)


def out_of_range(config: Config, *kinds: type) -> Iterator[str]:
    """A message for each number outside its range. ``kinds``: types to look at; none: all."""
    for setting in settings():
        if setting.type not in (kinds or (int, float)):
            continue
        for key, value in _values(config, setting.key):
            if value is not None and not setting.limits.holds(value):
                null = ", or null" if setting.optional else ""
                yield f"{key}={value}: has to be {setting.limits}{null}"


def _values(config: Config, key: str) -> Iterator[tuple[str, float | None]]:
    """The key and value of a setting; of each item for a key with ``[]``."""
    if "[]" in key:
        outer, inner = key.split("[].")
        for index, item in enumerate(value_of(config, outer)):
            yield f"{outer}[{index}].{inner}", getattr(item, inner)
    else:
        yield key, value_of(config, key)


def settings_of(cls: type, prefix: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        annotation, optional = _without_none(hints[field.name])
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from settings_of(annotation, key + ".")
            continue
        said = about(field)
        assert said is not None, f"{key} is not declared with setting()"
        rule = said.only_with
        if rule is not None and "." not in rule.setting:
            rule = dataclasses.replace(rule, setting=prefix + rule.setting)
        yield Setting(
            key,
            annotation,
            optional,
            _default(field),
            said.doc,
            said.limits,
            rule,
            said.not_with,
            said.common,
        )
        item = (*typing.get_args(annotation), None)[0]
        if dataclasses.is_dataclass(item) and isinstance(item, type):
            yield from settings_of(item, key + "[].")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"{field.name} has no default"
    return field.default_factory()


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0], len(kinds) < len(typing.get_args(annotation))
    return annotation, False


def _type_in_words(kind: Any) -> str:
    simple = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    if kind in simple:
        return simple[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and dataclasses.is_dataclass(args[0]):
        names = ", ".join(field.name for field in dataclasses.fields(args[0]))
        return f"list of mappings with {names}"
    if origin is list:
        return "list of " + {str: "texts"}.get(args[0], _type_in_words(args[0]) + "s")
    return "mapping"
