"""Convert a Hugging Face folder to Megatron shards and back.

When loading, each rank reads only the runs of rows or columns that it needs. Export is collective:
tensors are gathered in buckets, and the next bucket is in transfer while the caller uses the
current one, so a rank has two buckets of whole tensors and never the whole model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from rlmath.errors import WeightsError
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.hf_files import HfFolderReader, fuse_for_files, hf_folder_writer
from rlmath.weights.parameters import local_parameters
from rlmath.weights.pieces import (
    EMBEDDING,
    HEAD,
    NOT_FINITE,
    UNTIED_HEAD,
    file_shapes,
    file_tensors,
    first_of,
    misfits,
)


@torch.no_grad()
def load_from_hf(
    model_chunks: Sequence[nn.Module], folder: str | Path, spec: ModelSpec, parallel: ParallelRank
) -> None:
    """Fill this rank's Megatron parameters from a Hugging Face folder.

    Needs no communication. Values are converted to each parameter's type. Rows that pad the
    vocabulary are set to zero and must be excluded from sampling and softmax.

    Args:
        model_chunks: ``GPTModel``s of this stage, one per virtual stage, bare or wrapped. With a
            distributed optimizer, call this before the optimizer copies its main parameters, or let
            it reload them (``reload_model_params``).
        folder: Folder with safetensors.
        spec: ``read_model_spec`` of that folder.

    Raises:
        WeightsError: A tensor is missing, unknown, of another shape in the files or the model, or
            has NaN or infinity; the message names it.
    """
    with HfFolderReader(folder, spec) as reader:
        check_folder(reader, spec)
        head = spec.tied and HEAD in reader.names()
        for parameter in local_parameters(model_chunks, spec, parallel):
            filled = 0
            for piece in parameter.layout.pieces:
                run = (piece.dim, piece.hf_start, piece.length)
                rows = reader.read(piece.hf_name, *run)
                own = parameter.tensor.narrow(piece.dim, piece.local_start, piece.length)
                own.copy_(rows)
                # On the device: a GPU rank's single CPU thread takes about 8 s for 3.3 GiB.
                if not own.isfinite().all():
                    raise WeightsError(f"{piece.hf_name} in {folder} {NOT_FINITE}")
                if head and piece.hf_name == EMBEDDING and not rows.equal(reader.read(HEAD, *run)):
                    raise WeightsError(f"{folder}: {UNTIED_HEAD}")
                filled += piece.length
            dim = parameter.layout.pieces[0].dim if parameter.layout.pieces else 0
            # Pieces are contiguous, so the rest is vocabulary padding.
            parameter.tensor.narrow(dim, filled, parameter.tensor.shape[dim] - filled).zero_()


def check_folder(reader: HfFolderReader, spec: ModelSpec) -> None:
    """Compare names and shapes in the files with the model's table.

    Raises:
            WeightsError: Names up to five tensors that are missing, unknown or of another shape, or
            one of an unsupported type.
    """
    for name in reader.file_shapes():
        reader.dtype(name)  # Integers would silently be loaded as weights.
    problems = misfits(spec, reader.file_shapes())
    if problems:
        raise WeightsError(
            f"{reader.folder} does not fit {spec.architecture}: {first_of(problems)}"
        )


def save_to_hf(
    gatherer: BucketGatherer,
    spec: ModelSpec,
    folder: str | Path,
    source: str | Path,
    shard_size_mib: int = 4096,
    overwrite: bool = False,
) -> None:
    """Write the model as a Hugging Face folder; it appears when it is complete.

    Collective over all ranks; global rank 0 writes. Returns on every rank when the folder is
    complete. Raises WeightsError: on the writing rank if the folder cannot be
    written.

    Args:
        folder: Target; an older model there is replaced, other files in it are kept.
        source: Folder with config.json, generation_config.json and the tokenizer.
        shard_size_mib: Maximum size of a safetensors file.
        overwrite: Replace everything in the folder.
    """
    if gatherer.parallel.global_rank == 0:
        types = {meta.name: meta.dtype for meta in gatherer.tensors}
        parts, shapes = file_tensors(spec), file_shapes(spec)
        announced = {name: (shape, types[parts[name][0]]) for name, shape in shapes.items()}
        with hf_folder_writer(folder, announced, source, shard_size_mib, overwrite) as writer:
            tensors = itertools.chain.from_iterable(gatherer.gather_to_writer())
            for name, tensor in fuse_for_files(spec, tensors):
                writer.add(name, tensor)
    else:
        for _ in gatherer.gather_to_writer():
            pass
    # All ranks, not only this copy of the model: any of them may read the folder next.
    gatherer.wait_for_all()
