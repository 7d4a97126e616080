"""Contents of the files that settings name, which may change while the settings do not.

Read without torch. Sources of rewards and plug-ins are hashed in ``plugin_hashes``. Weights are not
read: a checkpoint has its own, and knows a base model by its fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlmath.config.benchmarks import benchmarks_of
from rlmath.config.hub_names import is_hub
from rlmath.config.schema import Config
from rlmath.model.folder import TINY

# Files of a model's folder that decide about prompts, stops and the model's form.
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_DIGITS = 12
# Larger files are read at as many places, so that a start is not slowed by them.
_READ_WHOLE_BYTES = 256 * 2**20
_PLACES = 64
_AT_ONCE_BYTES = 2**20


def contents(files: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """A digest of each file or folder, by a text with its name; one that cannot be read is left
    out."""
    found = {}
    for name, path in files:
        try:
            found[f"contents of {name}"] = _digest(path)
        except OSError:
            continue
    return found


def input_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Files of problems, and those that decide about a model's prompts and stops."""
    benchmarks = [path for one in benchmarks_of(config) for path in one.paths]
    for given in dict.fromkeys([*config.data.train_paths, *benchmarks]):
        if not is_hub(given):
            yield str(given), Path(given)
    own = config.model.path == TINY
    folder = Path(config.runner.run_dir) / "model" if own else Path(config.model.path)
    for name in _MODEL_FILES:
        yield f"model.path's {name}", folder / name


def reward_files(config: Config) -> Iterator[tuple[str, Path]]:
    for item in config.reward.items:
        place = item.name if item.name.endswith(".py") else item.name.rpartition(":")[0]
        if place.endswith(".py"):
            yield place, Path(place).expanduser()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    if path.is_dir():
        for inner in sorted(one for one in path.rglob("*") if one.is_file()):
            digest.update(f"{inner.relative_to(path)} {_digest(inner)}\n".encode())
        return digest.hexdigest()[:_DIGITS]
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= _READ_WHOLE_BYTES:
            file.seek(0)
            while piece := file.read(_AT_ONCE_BYTES):
                digest.update(piece)
        else:
            digest.update(str(size).encode())
            for place in range(_PLACES):
                file.seek((size - _AT_ONCE_BYTES) * place // (_PLACES - 1))
                digest.update(file.read(_AT_ONCE_BYTES))
    return digest.hexdigest()[:_DIGITS]
