"""Whether safetensors files are complete and of the model that config.json describes.

By their headers, which is quick even for a large model, and the values of a small one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlmath.checks.weight_headers import LENGTH_BYTES, FileTensor, tensors_in
from rlmath.checks.weight_values import is_small, not_finite
from rlmath.errors import UserError
from rlmath.model.folder import missing_model_files
from rlmath.model.spec import ADAPTER_FILE, adapter_instead, read_model_spec
from rlmath.weights.model_folder import INDEX_FILE, LFS_POINTER, is_lfs_pointer, listed_files
from rlmath.weights.pieces import EMBEDDING, HEAD, UNTIED_HEAD, file_shapes, first_of, misfits

# Types of a tensor, as safetensors name them.
TYPES = ("F64", "F32", "F16", "BF16")
# Two large tensors are compared in this many blocks of this size.
_BLOCK_BYTES, _BLOCKS = 2**20, 256


def refuse_broken_folder(folder: Path) -> None:
    """The checks of a model's folder that ``rlmath train --check`` makes, for tools. Raises
    UserError: the first of ``folder_problems``."""
    read_model_spec(folder)
    for problem in folder_problems(folder):
        raise UserError(f"{folder}: {problem}")


def folder_problems(folder: Path) -> Iterator[str]:
    """Errors in the files beside config.json, which has been read."""
    if (folder / ADAPTER_FILE).is_file():
        yield adapter_beside(folder)
        return
    missing = missing_model_files(str(folder))
    broken = [*broken_json_files(folder), *broken_weight_files(folder)]
    yield from (f"the folder lacks {one}" for one in missing)
    yield from broken
    if not missing and not broken:
        yield from filter(None, (weights_misfit(folder), tokenizer_misfit(folder)))


def adapter_beside(folder: Path) -> str:
    """The error of a LoRA adapter's folder that has a config.json as well."""
    own = [file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")]
    if not own:
        return adapter_instead(folder)
    return (
        f"{ADAPTER_FILE} is beside the model's own weights: transformers would apply that adapter, "
        "vLLM and the actor would not. Merge it with peft (merge_and_unload()), or move it to "
        "another folder, from which actor.lora.init_from can read it"
    )


def broken_weight_files(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.safetensors"))
    return [f"{file.name} {problem}" for file in files if (problem := _problem(file))]


def broken_json_files(folder: Path) -> list[str]:
    problems = []
    for name, look in _CONTENTS.items():
        file = folder / name
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        try:
            problem = look(content.decode("utf-8"))
        except ValueError as error:
            problem = f"cannot be read: {error}"
        if problem and is_lfs_pointer(content):
            problem = "is a Git LFS pointer; fetch it with git lfs pull"
        if problem:
            problems.append(f"{name} {problem}")
    return problems


def _object(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, and has to hold an object")
    return content


def _generation(text: str) -> str | None:
    given = _object(text).get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    # In Python a bool is an int.
    if all(type(one) is int for one in listed):
        return None
    return f"has eos_token_id {given!r}, which has to be the id of a token, or a list of ids"


def _tokenizer_settings(text: str) -> str | None:
    template = _object(text).get("chat_template")
    named = template if isinstance(template, list) else []
    if template is None or (
        isinstance(template, str | list)
        and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in named)
    ):
        return None
    return "has a chat_template that is neither a text nor a list of texts with names"


def _tokenizer(text: str) -> None:
    _object(text)


def _template(text: str) -> None:
    """Any text is one until it is rendered."""


_CONTENTS: dict[str, Callable[[str], str | None]] = {
    "generation_config.json": _generation,
    "tokenizer_config.json": _tokenizer_settings,
    "tokenizer.json": _tokenizer,
    "chat_template.jinja": _template,
}


def weights_misfit(folder: Path) -> str | None:
    """How tensors of complete files differ from config.json, or an error of that file."""
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
    held = {name: found[name] for name in file_shapes(spec)}
    return not_finite(held.items()) if is_small(held.values()) else None


def not_finite_weight(folder: Path) -> str | None:
    """The first of the model's tensors that holds NaN or infinity, in words, however large they
    are; ``None``: none does. Of a folder without ``folder_problems``."""
    wanted = file_shapes(read_model_spec(folder))
    files = sorted(set(listed_files(folder).values()))
    found = (pair for file in files for pair in tensors_in(folder / file).items())
    return not_finite((name, tensor) for name, tensor in found if name in wanted)


def vocabulary(tokenizer: str) -> dict[int, str]:
    """The token of each id, those that were added included, by the text of a tokenizer.json."""
    made = json.loads(tokenizer)
    model = made["model"]["vocab"]
    # By token in most tokenizers; in Unigram a list of pairs, in which the place is the id.
    if isinstance(model, dict):
        tokens = {index: token for token, index in model.items()}
    else:
        tokens = {index: pair[0] for index, pair in enumerate(model)}
    return tokens | {one["id"]: one["content"] for one in made.get("added_tokens") or ()}


def tokenizer_misfit(folder: Path) -> str | None:
    """Whether the tokenizer gives ids that the embedding has no row for.

    An engine would fail at the first such token, again and again.
    """
    try:
        tokens = vocabulary((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # Another form; transformers reads it later.
    rows, largest = read_model_spec(folder).vocab, max(tokens, default=-1)
    if largest < rows:
        return None
    return (
        f"tokenizer.json has ids up to {largest}, {tokens[largest]!r}, and the embedding has "
        f"{rows} rows (vocab_size in config.json); use the tokenizer that was published with the "
        "model, or add rows with resize_token_embeddings of transformers"
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
        f"is incomplete: header {LENGTH_BYTES + length:,} + tensors {max(ends, default=0):,} = "
        f"{whole:,} bytes, and the file has {size:,}; fetch it again"
    )
