"""What a model's folder holds beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

# The model.path of the tiny model, which a run makes for itself.
TINY = "tiny"


def has_chat_template(path: str) -> bool:
    """Whether the tokenizer in this folder brings a chat template."""
    if path == TINY:
        return True
    folder = Path(path)
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    file = folder / "tokenizer_config.json"
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
