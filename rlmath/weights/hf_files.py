"""Hugging Face model folders: read slices of tensors, write whole folders atomically."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rlmath.errors import WeightsError
from rlmath.model.spec import ModelSpec, model_spec, read_config
from rlmath.weights.model_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    check_target,
    listed_files,
    open_tensors,
    replacing_folder,
)
from rlmath.weights.pieces import file_tensors, hf_shapes, table_name

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class HfFolderReader:
    """Reads tensors, or runs of them, from a folder's safetensors.

    Files are memory-mapped, so only the requested bytes are read. Raises WeightsError: as
    :func:`listed_files`; or a shard is missing or truncated, or lacks a tensor of the index.

    Args:
        folder: Has ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.
        spec: The model spec; tensors then have the names of ``hf_shapes``, even if the files fuse
            them. ``None``: the files' names.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec | None = None) -> None:
        self.folder = Path(folder)
        # File tensor, first row and number of rows of each part of a fused tensor.
        self._parts: dict[str, tuple[str, int, int]] = {}
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        listed = listed_files(self.folder)
        if not (self.folder / INDEX_FILE).is_file():
            listed = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        held = {file: set(self._open(file).keys()) for file in sorted(set(listed.values()))}
        for name, file in listed.items():
            if name not in held[file]:
                raise WeightsError(
                    f"{self.folder / INDEX_FILE} says that {name} is in {file}; it is not"
                )
        self._file_of = {table_name(name): file for name, file in listed.items()}
        self._given = {table_name(name): name for name in listed}
        if spec is not None and spec.family.fused:
            self._split_fused(spec)

    def _split_fused(self, spec: ModelSpec) -> None:
        shapes = hf_shapes(spec)
        for file, names in file_tensors(spec).items():
            row = 0
            for name in names if len(names) > 1 else ():
                self._parts[name] = (file, row, shapes[name][0])
                row += shapes[name][0]

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = open_tensors(path)
            except FileNotFoundError:
                raise WeightsError(
                    f"{path} is listed in {INDEX_FILE} and missing; the copy is incomplete"
                ) from None
        return self._files[file]

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise WeightsError(f"{self.folder} has no tensor {name}")
        return self._open(self._file_of[name]).get_slice(self._given[name])

    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the files, from their headers."""
        return {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    def names(self) -> list[str]:
        """All tensors of the folder, with parts in place of fused tensors."""
        fused = {file for file, _, _ in self._parts.values()}
        return [*self._parts, *(name for name in self._file_of if name not in fused)]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, from the file's header; ``WeightsError`` for unsupported types."""
        file, _, _ = self._parts.get(name, (name, 0, 0))
        code = self._slice(file).get_dtype()
        if code not in _DTYPES:
            raise WeightsError(
                f"{name} in {self.folder} has type {code}; supported: {', '.join(_DTYPES)}"
            )
        return _DTYPES[code]

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """A tensor, or rows (``dim`` 0) or columns (``dim`` 1) ``start`` to ``start + length``."""
        if name in self._parts:
            file, row, rows = self._parts[name]
            if dim == 0:
                return self.read(file, 0, row + start, rows if length is None else length)
            return self.read(file, 0, row, rows).narrow(dim, start, length or 0)
        source = self._slice(name)
        if length is None:
            return source[:]
        run = slice(start, start + length)
        return source[run] if dim == 0 else source[:, run]

    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""
        self._files.clear()

    def __enter__(self) -> HfFolderReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def hf_folder_writer(
    folder: str | Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    source: str | Path,
    shard_size_mib: int = 4096,
    overwrite: bool = False,
) -> Iterator[HfFolderWriter]:
    """Write a Hugging Face folder tensor by tensor; it appears when it is complete.

    Until then it is a hidden folder next to the target, which is removed after an error. Leftovers
    of killed processes are removed. Raises UserError: a file with the folder's name exists.

    Args:
        folder: Target folder. An older model there is replaced; files in it that do not belong to a
            model are kept (:mod:`rlmath.weights.model_folder`).
        tensors: Shape and type of each tensor, in the order in which they will be added.
        source: Folder with the model's config.json and tokenizer.
        shard_size_mib: Maximum size of a file.
        overwrite: Replace everything in the folder.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        check_target(folder)
    with replacing_folder(folder, overwrite=overwrite) as partial:
        writer = HfFolderWriter(partial, tensors, shard_size_mib)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()
        dtype = next(iter(tensors.values()))[1]
        write_model_files(partial, Path(source), dtype, folder.name)


class HfFolderWriter:
    """The safetensors of a folder, and their index. See :func:`hf_folder_writer`."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        shard_size_mib: int,
    ) -> None:
        self._folder, self._tensors = folder, dict(tensors)
        self._shards = _cut_into_shards(self._tensors, shard_size_mib * 2**20)
        self._order = iter([(name, i) for i, shard in enumerate(self._shards) for name in shard])
        self._open_file: IO[bytes] | None = None
        self._open_shard = -1
        self._added = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor. Raises WeightsError: it is not the next announced tensor."""
        expected, shard = next(self._order, (None, -1))
        if name != expected:
            raise WeightsError(f"tensor {name} came where {expected} was announced")
        shape, dtype = self._tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise WeightsError(
                f"{name} was announced as {shape} {dtype} and came as "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
        if shard != self._open_shard:
            self.close()
            self._open_file = self._begin_shard(shard)
        assert self._open_file is not None
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._open_file.write(memoryview(flat.numpy()))
        self._added += 1

    def finish(self) -> None:
        """Write the index. Raises WeightsError: announced tensors are missing."""
        if self._added != len(self._tensors):
            missing = list(self._tensors)[self._added]
            raise WeightsError(
                f"{self._folder}: {self._added} of {len(self._tensors)} tensors came; "
                f"the next would be {missing}"
            )
        if len(self._shards) > 1:
            self._write_index()

    def close(self) -> None:
        """Close the open shard."""
        if self._open_file is not None:
            self._open_file.close()

    def _shard_name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return SINGLE_FILE
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _begin_shard(self, shard: int) -> IO[bytes]:
        """Start a safetensors file: the header's length (8 bytes), the header, then the bytes."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in self._shards[shard]:
            shape, dtype = self._tensors[name]
            end = at + _num_bytes(shape, dtype)
            header[name] = {
                "dtype": _DTYPE_CODES[dtype],
                "shape": list(shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header).encode()
        # Readers map the file and expect aligned data.
        text += b" " * (-len(text) % 8)
        file = open(self._folder / self._shard_name(shard), "wb")  # noqa: SIM115
        file.write(len(text).to_bytes(8, "little") + text)
        self._open_shard = shard
        return file

    def _write_index(self) -> None:
        total = sum(_num_bytes(shape, dtype) for shape, dtype in self._tensors.values())
        where = {
            name: self._shard_name(i) for i, shard in enumerate(self._shards) for name in shard
        }
        _write_json(
            self._folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where}
        )


def fuse_for_files(
    spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors in the order of ``hf_shapes`` to those of the files, in the order of
    ``file_shapes``."""
    file_of = {name: file for file, names in file_tensors(spec).items() for name in names}
    parts = file_tensors(spec)
    waiting: list[Tensor] = []
    for name, tensor in tensors:
        file = file_of[name]
        # Parts of an incomplete tensor are copied, because the caller reuses their memory.
        waiting.append(tensor if len(parts[file]) == 1 else tensor.clone())
        if name == parts[file][-1]:
            yield file, waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            waiting = []


def write_model_files(
    folder: Path, source: Path, dtype: torch.dtype, name: str | None = None
) -> None:
    """Write everything except the tensors: configs, tokenizer and model card.

    Args:
        source: Folder of the model that training started from.
        dtype: Type of the weights, written to config.json.
        name: Name of the model in README.md; ``None``: the folder's.
    """
    config = read_config(source)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    _write_json(folder / "generation_config.json", generation_config(source))
    card = (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- rlmath\n"
        f"---\n\n# {name or folder.name}\n\n"
        f"A {model_spec(config).architecture} trained with rlmath. Weights are in {config[key]}.\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def generation_config(source: Path) -> dict[str, Any]:
    """generation_config.json of a folder, with the tokenizer's end-of-sequence token added.

    Otherwise an engine that reads this file and a trainer that reads the tokenizer would disagree
    about where a response ends. Without the file, config.json decides, as in transformers and vLLM.
    """
    path = source / "generation_config.json"
    result: dict[str, Any]
    if path.is_file():
        result = json.loads(path.read_text(encoding="utf-8"))
    else:
        ends = read_config(source).get("eos_token_id")
        result = {} if ends is None else {"eos_token_id": ends}
    eos = tokenizer_eos(source)
    if eos is None:
        return result
    listed = result.get("eos_token_id")
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if eos not in ids:
        ids = [eos, *ids]
    result["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return result


def tokenizer_eos(source: Path) -> int | None:
    """Id of the tokenizer's end-of-sequence token; ``None`` if the folder has no tokenizer."""
    settings, vocabulary = source / "tokenizer_config.json", source / "tokenizer.json"
    if not (settings.is_file() and vocabulary.is_file()):
        return None
    content = json.loads(settings.read_text(encoding="utf-8"))
    token = content.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    # Tokens that transformers adds to those in tokenizer.json.
    for number, added in (content.get("added_tokens_decoder") or {}).items():
        if added["content"] == token:
            return int(number)
    from tokenizers import Tokenizer

    found: int | None = Tokenizer.from_file(str(vocabulary)).token_to_id(token)
    if found is None:
        raise WeightsError(f"{vocabulary} does not have {settings.name}'s eos_token {token!r}")
    return found


def _num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _cut_into_shards(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], limit_bytes: int
) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, (shape, dtype) in tensors.items():
        size = _num_bytes(shape, dtype)
        if shards[-1] and held + size > limit_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
