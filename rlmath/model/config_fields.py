"""Typed access to the fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmath.errors import ModelError

# Entries of layer_types, and keys of rope_parameters if they differ.
FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Fields:
    """Typed access to the fields of a config.json."""

    given: Mapping[str, Any]

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError: it is missing without a default, or invalid; the
        same for ``number``."""
        value = self._value(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{key} is {value!r}, and has to be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise ModelError(f"{key} is {value!r}, and has to be a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Whether the field is present and true."""
        return bool(self.given.get(key, False))

    def _value(self, key: str, default: float | None) -> Any:
        value = self.given.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(
                f"no field {key}; use the config.json that was published with the model"
            )
        return value
