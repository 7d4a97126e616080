"""What the checks need to know of the data files and the machine, and which files a model has.

Reads a few small files and nothing else: no torch, no transformers, no weights.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.schema import Device
from rlmath.errors import ConfigError
from rlmath.model.folder import TINY
from rlmath.utils import transformer_engine as te_install

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Rows that are looked at in each data file; the whole file is read when the run starts.
PEEKED_ROWS = 4


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        gpus: NVIDIA GPUs that this process may use.
        torch_build: torch's version, such as ``2.13.0+cpu``; ``None`` when it is not installed.
        memory_bytes: Memory, the container's limit where there is one.
        disk_bytes: Free space where runs go; ``None``: asked of the run folder's disk.
        transformer_engine: What Transformer Engine lacks; ``None``: nothing that can be seen
            without importing it. Only looked for where there are GPUs.
        flash_attention: Whether flash-attn is installed, which batch invariance needs.
    """

    gpus: int
    torch_build: str | None
    memory_bytes: int
    disk_bytes: int | None = None
    transformer_engine: str | None = None
    flash_attention: bool = True

    @property
    def has_cuda(self) -> bool:
        """Whether torch can use a GPU here."""
        return self.gpus > 0 and self.torch_build is not None and "+cpu" not in self.torch_build

    def device(self, wanted: Device) -> Device:
        """What ``cluster.device`` stands for on this machine."""
        if wanted is Device.auto:
            return Device.cuda if self.has_cuda else Device.cpu
        return wanted

    def free_bytes(self, path: str | Path) -> int:
        """Free space on the disk on which ``path`` is, or will be."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        return shutil.disk_usage(existing_parent(path)).free

    @classmethod
    def here(cls) -> Machine:
        """Look at the machine, without starting CUDA."""
        try:
            torch_build = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_build = None
        gpus = _visible_gpus()
        return cls(
            gpus,
            torch_build,
            _memory_bytes(),
            transformer_engine=te_install.missing_part() if gpus else None,
            flash_attention=te_install.has_flash_attention(),
        )


def missing_model_files(path: str) -> list[str]:
    """Files that a model's folder should have and has not."""
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
        except (ValueError, KeyError, AttributeError):
            return [*missing, f"a {index.name} that can be read"]
        missing += sorted(name for name in shards if not (folder / name).is_file())
    elif not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    return missing


def peek_rows(path: str | Path) -> list[tuple[str, Any]]:
    """The first rows of a data file, each with where it stands (``file.jsonl:3``).

    Args:
        path: A ``.jsonl``, ``.json`` or ``.parquet`` file.

    Raises:
        ConfigError: The file is missing, empty, of another kind, or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        kind = "it is a folder; give the files in it" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {kind}")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: data files end in {', '.join(readers)}")
    try:
        rows = readers[path.suffix](path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows in it")
    return rows


def existing_parent(path: str | Path) -> Path:
    """``path`` itself, or the nearest folder above it that is there."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def _jsonl_rows(path: Path) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:
                rows.append((f"{path}:{number}", error))
            if len(rows) == PEEKED_ROWS:
                break
    return rows


def _json_rows(path: Path) -> list[tuple[str, Any]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):  # An object with the list of rows in it.
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else data
    if not isinstance(data, list):
        raise ValueError("a .json data file is a list of rows, or an object with one list in it")
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(data[:PEEKED_ROWS])]


def _parquet_rows(path: Path) -> list[tuple[str, Any]]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        batch = next(file.iter_batches(batch_size=PEEKED_ROWS), None)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(str(error)) from error
    rows = [] if batch is None else batch.to_pylist()
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(rows)]


def _visible_gpus() -> int:
    cards = Path("/proc/driver/nvidia/gpus")
    # Containers often hide /proc but give the device files.
    there = len(list(cards.iterdir())) if cards.is_dir() else 0
    there = there or len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    # CUDA stops at the first name that is not valid, such as -1.
    names = [name.strip() for name in visible.split(",")]
    valid = 0
    for name in names:
        if not name or name.startswith("-"):
            break
        valid += 1
    return min(there, valid)


def _memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            memory = min(memory, int(text))
    return memory
