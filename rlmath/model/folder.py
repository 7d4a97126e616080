"""Files in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

# The model.path of the tiny model, which a run creates.
TINY = "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def missing_model_files(path: str) -> list[str]:
    """Required files that are missing in a model's folder."""
    if path == TINY:
        return []
    folder = Path(path)
    missing = []
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES)})")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing += sorted(name for name in shards if not (folder / name).is_file())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            why = f"{type(error).__name__}: {error}; fetch it again"
            return [*missing, f"a {index.name} with weight_map, the file of each tensor ({why})"]
    elif not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    return missing
