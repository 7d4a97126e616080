"""A field of a settings section: its default, meaning, range and condition of use.

A section is a dataclass, next to the component that uses it or in ``rlmath/config/``:

    @dataclass
    class RunnerConfig:
        steps: int = setting(1000, "Number of training steps (rollouts).", least=1)

Error messages, checks and ``docs/settings.md`` read the same fields.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

_KEY = "rlmath.setting"


@dataclass(frozen=True)
class Range:
    """An interval; ``above`` and ``below`` are open ends, ``least`` and ``most`` closed ones."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is finite and in the interval."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        named = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        ends = [f"{words} {end:.12g}" for words, end in named.items() if end is not None]
        return " and ".join(ends) or "finite"


@dataclass(frozen=True)
class OnlyWith:
    """The condition under which a setting is used; otherwise it must keep its default."""

    setting: str  # A setting of the same section, or a full key such as algorithm.kl_coef.
    # Values of that setting with which this one is used; empty: any value but its default,
    # described by words.
    choices: tuple[Any, ...] = ()
    words: str = ""  # Such as "more than 0".
    also: str = ""  # Full key of a setting that uses it as well, unless that is null.


@dataclass(frozen=True)
class NotWith:
    """A value of a setting that does not work with a value of another one."""

    # Such as model.dtype=float32, as in YAML. cluster.device is the resolved device: cpu or cuda.
    other: str
    why: str  # The reason.
    fix: str  # Such as "use bfloat16".
    value: str = ""  # The value of this setting, as in YAML; empty: any value but its default.


@dataclass(frozen=True)
class About:
    """Metadata of a field made by :func:`setting`."""

    doc: str  # Effect of the setting, then the meaning of special values.
    limits: Range  # The range of a number.
    only_with: OnlyWith | None  # Condition of use; None: always used.
    not_with: tuple[NotWith, ...]  # Values of other settings that it does not work with.
    common: bool  # Whether most users change it.


def setting(
    default: Any,
    doc: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    only_with: OnlyWith | None = None,
    not_with: NotWith | tuple[NotWith, ...] = (),
    common: bool = False,
) -> Any:
    """A dataclass field with its documentation.

    Args:
        default: The default, or a function that makes it (``list``).
        doc: Effect of the setting, then the meaning of special values.
        least: The range of a number; see :class:`Range` for this and the next three.
        above: See ``least``.
        most: See ``least``.
        below: See ``least``.
        only_with: When the setting is used; otherwise a changed value is an error.
        not_with: Values of other settings that it does not work with.
        common: Show it among the settings that most users change.
    """
    pairs = not_with if isinstance(not_with, tuple) else (not_with,)
    about = About(doc, Range(least, above, most, below), only_with, pairs, common)
    kind = {"default_factory": default} if callable(default) else {"default": default}
    field: Any = dataclasses.field(**kind, metadata={_KEY: about})
    return field


def about(field: dataclasses.Field[Any]) -> About | None:
    """Metadata of a field; ``None`` for a subsection."""
    found: About | None = field.metadata.get(_KEY)
    return found


@dataclass(frozen=True)
class Options:
    """Options of a loss or estimator: a frozen dataclass next to it, with fields by ``setting``.
    Raises ValueError: a number is outside its range."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Create from YAML values; enumeration members are given by name."""
        hints = typing.get_type_hints(cls)

        def value(name: str, given: Any) -> Any:
            for kind in typing.get_args(hints[name]) or (hints[name],):  # Or null.
                if isinstance(given, str) and isinstance(kind, type) and issubclass(kind, Enum):
                    return kind[given]
            return given

        return cls(**{name: value(name, given) for name, given in plain.items()})

    def plain(self) -> dict[str, Any]:
        """All of them as in YAML, for :meth:`of`."""
        return {
            name: value.name if isinstance(value, Enum) else value
            for name, value in vars(self).items()
        }

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            said, value = about(field), getattr(self, field.name)
            if said is None or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not said.limits.holds(value):
                raise ValueError(f"{field.name} = {value}: has to be {said.limits}")
