"""Reads the index of a checkpoint's tensors without executing code in it.

torch reads the index with pickle, and also objects that are no tensors. A checkpoint may come from
someone else, so code in both is ruled out before torch reads them.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from rlmath.checkpoint.manifest import BrokenCheckpoint

_INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        # Metadata of objects that are no tensors; they are refused by name afterwards.
        (_METADATA, "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    }
)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _ALLOWED:
            raise BrokenCheckpoint(f"the index of tensors names {module}.{name}; refused")
        return super().find_class(module, name)


def check_index(folder: Path) -> None:
    """Refuse an index that names anything but tensors and their descriptions. Raises
    BrokenCheckpoint: with the name that was refused, or why the index cannot be read."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = folder / _INDEX
    try:
        with open(path, "rb") as file:
            index = _IndexUnpickler(file).load()
        entries = dict(index.state_dict_metadata)
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is missing") from None
    except BrokenCheckpoint:
        raise
    except Exception as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r}") from None
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise BrokenCheckpoint(f"{path}: {name} is no tensor; refused")
