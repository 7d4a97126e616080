"""Whether safetensors files are whole and of the model that config.json describes.

By their headers, which is quick even for a large model, and the values of a small one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rlmath.checks.weight_headers import LENGTH_BYTES, FileTensor, tensors_in
from rlmath.checks.weight_values import not_finite
from rlmath.errors import UserError
from rlmath.model.folder import missing_model_files
from rlmath.model.spec import read_model_spec
from rlmath.weights.model_folder import INDEX_FILE, LFS_POINTER, is_lfs_pointer, listed_files
from rlmath.weights.pieces import EMBEDDING, HEAD, UNTIED_HEAD, file_shapes, first_of, misfits

# Of a tensor, as safetensors name them.
TYPES = ("F64", "F32", "F16", "BF16")
# What is compared of two large tensors.
_BLOCK_BYTES, _BLOCKS = 2**20, 256


def refuse_broken_folder(folder: Path) -> None:
    """For tools: the checks of a model's folder that ``rlmath train --check`` makes.

    Raises:
        UserError: With the first of ``folder_problems``.
    """
    read_model_spec(folder)
    for problem in folder_problems(folder):
        raise UserError(f"{folder}: {problem}")


def folder_problems(folder: Path) -> Iterator[str]:
    """What is wrong with the files beside config.json, which has been read."""
    missing = missing_model_files(str(folder))
    broken = [*broken_json_files(folder), *broken_weight_files(folder)]
    yield from (f"the folder lacks {one}" for one in missing)
    yield from broken
    if not missing and not broken:
        yield from filter(None, (weights_misfit(folder), tokenizer_misfit(folder)))


def broken_weight_files(folder: Path) -> list[str]:
    """What is wrong with each safetensors file of a folder that is not whole, one line each."""
    files = sorted(folder.glob("*.safetensors"))
    return [f"{file.name} {problem}" for file in files if (problem := _problem(file))]


def broken_json_files(folder: Path) -> list[str]:
    """What is wrong with each of a model's JSON files that cannot be read, one line each."""
    problems = []
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            pointer = is_lfs_pointer((folder / name).read_bytes())
            said = (
                "is a Git LFS pointer; fetch it with git lfs pull"
                if pointer
                else f"cannot be read: {error}"
            )
            problems.append(f"{name} {said}")
    return problems


def weights_misfit(folder: Path) -> str | None:
    """How tensors in whole files differ from what config.json says, or what is wrong with that."""
    try:
        spec = read_model_spec(folder)
        files = sorted(set(listed_files(folder).values()))
    except UserError as error:
        return str(error)
    found: dict[str, FileTensor] = {}
    for file in files:
        if not (folder / file).is_file():
            return f"{file}, which {INDEX_FILE} lists, is missing"
        here = tensors_in(folder / file)
        if twice := sorted(found.keys() & here.keys()):
            places = [f"{name} is in {found[name].file.name} and {file}" for name in twice]
            return (
                f"{first_of(places)}: the actor reads the one that the index names, and vLLM the "
                "last one; remove the other"
            )
        found |= here
    # Whole numbers would be taken for weights, without a word.
    other = [
        f"{name} has type {one.dtype}" for name, one in found.items() if one.dtype not in TYPES
    ]
    if other:
        return f"weights have to be of type {', '.join(TYPES)}, and {first_of(sorted(other))}"
    problems = misfits(spec, {name: one.shape for name, one in found.items()})
    if problems:
        return f"the weights are not those of config.json: {first_of(problems)}"
    if spec.tied and HEAD in found and _differ(found[EMBEDDING], found[HEAD]):
        return UNTIED_HEAD
    return not_finite((name, found[name]) for name in file_shapes(spec))


def tokenizer_misfit(folder: Path) -> str | None:
    """Whether the tokenizer gives ids that the embedding has no row for.

    An engine would fail at the first such token, again and again.
    """
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        # By token in most tokenizers; in Unigram a list, in which the place is the id.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", ())}
        largest = max((*ids, *added), default=-1)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Another form; transformers reads it later.
    rows = read_model_spec(folder).vocab
    if largest < rows:
        return None
    name = f", {added[largest]!r}" if largest in added else ""
    return (
        f"tokenizer.json has ids up to {largest}{name}, and the embedding has {rows} rows "
        "(vocab_size in config.json); take the tokenizer that was published with the model, or add "
        "rows with resize_token_embeddings of transformers"
    )


def _differ(first: FileTensor, second: FileTensor) -> bool:
    """Whether two tensors of one shape differ in the bytes that are looked at.

    Of large ones that is a part; ``load_from_hf`` compares all of them.
    """
    if first.dtype != second.dtype:
        return False
    size = first.end - first.begin
    step = max(_BLOCK_BYTES, size // _BLOCKS)
    with first.file.open("rb") as one, second.file.open("rb") as other:
        for place in range(0, size, step):
            one.seek(first.begin + place)
            other.seek(second.begin + place)
            count = min(_BLOCK_BYTES, size - place)
            if one.read(count) != other.read(count):
                return True
    return False


def _problem(file: Path) -> str | None:
    if not file.is_file():
        return f"is a link to {file.resolve()}, where no file is; fetch it again"
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(LENGTH_BYTES)
        if is_lfs_pointer(start):
            return LFS_POINTER
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or LENGTH_BYTES + length > size:
            return f"is cut off, or no safetensors file: its header does not fit in {size:,} bytes"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "is no safetensors file: its header cannot be read"
    whole = LENGTH_BYTES + length + max(ends, default=0)
    if whole == size:
        return None
    return (
        f"is not whole: header {LENGTH_BYTES + length:,} + tensors {max(ends, default=0):,} = "
        f"{whole:,} bytes, and the file has {size:,}; fetch it again"
    )
