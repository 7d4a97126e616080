"""Rotary position embeddings in config.json, for transformers 5 and older versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.errors import ModelError
from rlmath.model.config_fields import FULL, WINDOWED, Fields
from rlmath.model.families import Family

PARTIAL_ROTARY = "partial_rotary_factor"
ORIGINAL_POSITIONS = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float  # Base of the frequencies.
    kind: str  # One of the family's ropes, such as default or llama3.
    # A mapping is not hashable; equality still compares it.
    # Other fields of the scaling, such as factor; empty for default.
    parameters: Mapping[str, float] = field(hash=False)

    @property
    def reach(self) -> int | None:
        """Maximum positions with yarn, in tokens; ``None`` for another kind."""
        if self.kind != "yarn":
            return None
        return int(self.parameters["factor"] * self.parameters[ORIGINAL_POSITIONS])


def read_ropes(fields: Fields, family: Family) -> tuple[Rope, Rope | None]:
    """Rotary embeddings of layers without and with a window; ``None``: the same. Raises ModelError:
    unsupported kind or parameter; the same for the other two functions."""
    if not family.full_every:
        return _rope(fields, family), None
    given, theta = fields.given, family.defaults["rope_theta"]
    by_kind = given.get("rope_parameters")
    if by_kind is None:
        if given["rope_theta"] != theta:
            # transformers would use it only for layers without a window.
            raise ModelError(
                f"rope_theta is {given['rope_theta']} without rope_parameters, which say it of "
                f"{FULL} and of {WINDOWED}; save the folder with transformers 5 or newer"
            )
        without = {key: value for key, value in given.items() if key != "rope_scaling"}
        return _rope(fields, family), _rope(Fields(without), family)
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= {FULL, WINDOWED}:
        raise ModelError(
            f"rope_parameters is {by_kind!r}, and has to have an object for {FULL} and one for "
            f"{WINDOWED}"
        )
    full, windowed = (
        _rope(Fields({**given, "rope_parameters": {"rope_theta": theta, **(of or {})}}), family)
        for of in (by_kind.get(FULL), by_kind.get(WINDOWED))
    )
    return full, windowed


def _rope(fields: Fields, family: Family) -> Rope:
    """transformers 5 has one dict; older versions have a number and an optional dict."""
    key = "rope_parameters" if fields.given.get("rope_parameters") else "rope_scaling"
    scaling = fields.given.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{key} is {scaling!r}, and has to be an object")
    scaling = dict(scaling)
    theta = scaling.pop("rope_theta", None) or fields.given.get("rope_theta", 10000.0)
    kind = str(scaling.pop("rope_type", None) or scaling.get("type") or "default")
    scaling.pop("type", None)
    scaling.pop(PARTIAL_ROTARY, None)
    if kind not in family.ropes:
        raise ModelError(
            f"{key} asks for a rotary embedding of type {kind}; supported: "
            f"{', '.join(family.ropes)}"
        )
    if kind in ("linear", "yarn"):
        _positive(scaling, "factor", key)
    if kind in ("llama3", "yarn"):
        # As in transformers: its own field counts first; without any, the longest.
        original = fields.given.get("original_max_position_embeddings")
        scaling.setdefault(ORIGINAL_POSITIONS, fields.whole("max_position_embeddings"))
        if original is not None:
            scaling[ORIGINAL_POSITIONS] = original
        _positive(scaling, ORIGINAL_POSITIONS, key)
    if not isinstance(theta, int | float) or not theta > 0:
        raise ModelError(f"rope_theta is {theta!r}, and has to be a number above 0")
    return Rope(float(theta), kind, {} if kind == "default" else scaling)


def read_partial_rotary(fields: Fields, family: Family) -> float:
    """Share of a head's width that is rotated, from 0 to 1; in transformers 5 it is a parameter of
    the rotary embedding."""
    parameters = fields.given.get("rope_parameters")
    given = parameters.get(PARTIAL_ROTARY) if isinstance(parameters, Mapping) else None
    if given is None:
        given = fields.given.get(PARTIAL_ROTARY)
    if given is None:
        return family.partial_rotary or 1.0
    if not isinstance(given, int | float) or not 0 < given <= 1:
        raise ModelError(f"{PARTIAL_ROTARY} is {given!r}, and has to be above 0 and at most 1")
    if family.partial_rotary is None and given != 1:
        raise ModelError(
            f"{PARTIAL_ROTARY} is {given}; {', '.join(family.architectures)} is supported with "
            "whole heads rotated"
        )
    return float(given)


def _positive(scaling: Mapping[str, Any], name: str, key: str) -> None:
    value = scaling.get(name)
    if not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} has {name} {value!r}, which has to be a number above 0")


def read_positions(fields: Fields, rope: Rope) -> int:
    """Maximum sequence length in tokens, as in vLLM."""
    most = fields.whole("max_position_embeddings")
    if rope.kind == "linear":
        return int(most * rope.parameters["factor"])
    return most if rope.reach is None else min(most, rope.reach)
