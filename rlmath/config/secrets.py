"""Keeps secrets out of all output of a run."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "(hidden)"
# As a separate word of the key: max_prompt_tokens does not match.
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:api_?key|key|secret|password|passwd|credentials?|auth|authorization|token|bearer)$",
    re.IGNORECASE,
)
_NO_SECRETS = (
    *("prompt_key", "answer_key", "response_key", "id_key"),
    *("label_key", "action_key", "observation_key"),  # options of environments
)
_URL_WITH_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")


def without_secrets(value: Any, key: str = "") -> Any:
    """``value`` with passwords, tokens and keys replaced.

    A text is one when the key that it stands under says so (``api_key``, ``password``, ``token``,
    ``Authorization``, ...); passwords within URLs are replaced wherever they are. ``value``:
    Dictionaries and lists of anything.
    """
    if isinstance(value, dict):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    if value and key not in _NO_SECRETS and _SECRET_KEY.search(key):
        return HIDDEN
    return _URL_WITH_PASSWORD.sub(rf"\1:{HIDDEN}@", value)
