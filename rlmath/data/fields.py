"""Fields of a row by name, nested ones by a dotted name: ``reward_model.ground_truth``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from rlmath.data.formats import MalformedRowError

_IMAGES = ("image", "images", "decoded_image", "videos", "audio")
# Other names of the same fields, for hints.
_ALIASES = {
    "prompt_key": ("problem", "question", "prompt", "messages", "instruction"),
    "answer_key": ("answer", "ground_truth", "solutions", "final_answer", "target", "solution"),
    "response_key": ("response", "solution", "output", "completion"),
}


def has_field(fields: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a field of this name, or nested fields along it."""
    return key in fields or _parent(fields, key) is not None


def field_of(fields: Mapping[str, Any], key: str) -> Any:
    if key in fields:
        return fields[key]
    parent = _parent(fields, key)
    assert parent is not None
    return parent[key.rpartition(".")[2]]


def no_such_field(fields: Mapping[str, Any], setting: str, key: str) -> str:
    """A message with the row's fields, nested ones included, and the one probably meant."""
    names = list(_names(fields))
    last = setting.rpartition(".")[2]
    aliases = (key, *_ALIASES.get(last, ()))
    found = [
        name
        for alias in aliases
        for name in names
        if name.rpartition(".")[2].lower() == alias.lower()
    ]
    found += difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {setting}={found[0]}?" if found else ""
    return f"its fields are {', '.join(names) or 'none'}{hint}"


def refuse_images(fields: Mapping[str, Any]) -> None:
    """
    Raises:
        MalformedRowError: A field holds an image, which the model would never get.
    """
    for name, value in fields.items():
        first = value[0] if isinstance(value, list) and value else value
        encoded = isinstance(first, bytes) or (isinstance(first, dict) and "bytes" in first)
        if encoded or (name in _IMAGES and value):
            raise MalformedRowError(
                f"field {name!r} holds an image or other media, and rlmath trains on text alone; "
                "use rows or data sets without them"
            )


def _parent(fields: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    place: Any = fields
    *parts, last = key.split(".")
    for part in parts:
        place = place.get(part) if isinstance(place, Mapping) else None
    return place if parts and isinstance(place, Mapping) and last in place else None


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields and of those one level below, as settings take them."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield str(name)
