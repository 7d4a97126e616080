"""Hugging Face folder to Megatron shards and back.

Loading reads on each rank the runs of rows or columns that the rank holds and nothing else.
Exporting is collective: tensors are gathered in buckets, the next bucket on its way while the
caller works on this one, so that a rank holds two buckets of whole tensors and never the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.config.weights import BUCKET_MIB
from rlmath.errors import WeightsError
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.gather import BucketGatherer, Merge
from rlmath.weights.hf_files import HfFolderReader, HfFolderWriter, fused_for_files
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
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    spec: ModelSpec,
    parallel: ParallelRank,
) -> None:
    """Fill this rank's Megatron parameters from a Hugging Face folder.

    Needs no communication. Values are converted to each parameter's type; rows that pad the
    vocabulary become zero, and whoever samples or takes a softmax has to leave them out.

    Args:
        model_chunks: ``GPTModel``s of this stage, one per virtual stage, bare or wrapped. Under a
            distributed optimizer call this before the optimizer copies its main parameters, or
            have it reload them (``reload_model_params``).
        folder: With safetensors.
        spec: ``read_model_spec`` of that folder.
        parallel: This rank.

    Raises:
        WeightsError: A tensor is missing, unknown, or of another shape, in the files or in the
            model, or holds NaN or infinity; the message names it.
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
                # On the device: the one CPU thread of a GPU's rank takes about 8 s for 3.3 GiB.
                if not own.isfinite().all():
                    raise WeightsError(f"{piece.hf_name} in {folder} {NOT_FINITE}")
                if head and piece.hf_name == EMBEDDING and not rows.equal(reader.read(HEAD, *run)):
                    raise WeightsError(f"{folder}: {UNTIED_HEAD}")
                filled += piece.length
            dim = parameter.layout.pieces[0].dim if parameter.layout.pieces else 0
            # Pieces lie end to end, so what is left is the padding of the vocabulary.
            parameter.tensor.narrow(dim, filled, parameter.tensor.shape[dim] - filled).zero_()


def check_folder(reader: HfFolderReader, spec: ModelSpec) -> None:
    """Compare the names and shapes in the files with what the model's table expects.

    Raises:
        WeightsError: Naming up to five tensors that are missing, unknown, or of another shape, or
            one of a type that no weights have.
    """
    for name in reader.file_shapes():
        reader.dtype(name)  # Whole numbers would be taken for weights, without a word.
    problems = misfits(spec, reader.file_shapes())
    if problems:
        raise WeightsError(
            f"{reader.folder} does not fit {spec.architecture}: {first_of(problems)}"
        )


def hf_tensors(
    model_chunks: Sequence[nn.Module],
    spec: ModelSpec,
    parallel: ParallelRank,
    bucket_size_mib: float = BUCKET_MIB,
    destination: int | None = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Gather the model as Hugging Face tensors, bucket by bucket.

    Collective over ``parallel.group``: every rank of it iterates to the end.

    Args:
        model_chunks: As for ``load_from_hf``.
        spec: The model.
        parallel: This rank.
        bucket_size_mib: A bucket holds whole tensors of about this size together; a larger tensor
            is its own bucket.
        destination: Global rank that gets the tensors; ``None``: all ranks of the group.
        dtype: Type to send; ``None``: each parameter's own.

    Yields:
        Name and tensor in model order, the same on each run; an empty list per bucket on ranks
        that get none. The tensors are the caller's: no view of a parameter.
    """
    gatherer = BucketGatherer(model_chunks, spec, parallel, bucket_size_mib, dtype)
    yield from gatherer.gather(destination)


def save_to_hf(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    source: str | Path,
    spec: ModelSpec,
    parallel: ParallelRank,
    bucket_size_mib: float = BUCKET_MIB,
    shard_size_mib: int = 4096,
    dtype: torch.dtype | None = None,
    card: str | None = None,
    overwrite: bool = False,
    merge: Merge | None = None,
) -> None:
    """Write the model as a Hugging Face folder; it appears when it is complete.

    Collective over all ranks; global rank 0 writes. Returns on every rank once the folder is there.

    Args:
        model_chunks: As for ``load_from_hf``.
        folder: To write; an older model there is replaced, other files in it are kept.
        source: Folder that gives config.json, generation_config.json and the tokenizer.
        spec: The model.
        parallel: This rank.
        bucket_size_mib: As for ``hf_tensors``.
        shard_size_mib: Largest safetensors file.
        dtype: Type to write; ``None``: each parameter's own.
        card: Text of README.md; ``None`` writes a short one.
        overwrite: Replace whatever the folder holds.
        merge: See ``BucketGatherer``.

    Raises:
        WeightsError: As ``hf_tensors``, or on the writing rank when the folder cannot be written.
    """
    gatherer = BucketGatherer(model_chunks, spec, parallel, bucket_size_mib, dtype, merge=merge)
    writes = parallel.global_rank == 0
    if not writes:
        for _ in gatherer.gather(0):
            pass
    else:
        _write(gatherer, spec, Path(folder), Path(source), shard_size_mib, card, overwrite)
    if parallel.group is not None:
        # All ranks, not this copy of the model alone: any of them may read the folder next.
        dist.barrier()


def _write(
    gatherer: BucketGatherer,
    spec: ModelSpec,
    folder: Path,
    source: Path,
    shard_size_mib: int,
    card: str | None,
    overwrite: bool,
) -> None:
    types = {meta.name: meta.dtype for meta in gatherer.tensors}
    parts = file_tensors(spec)
    announced = {name: (shape, types[parts[name][0]]) for name, shape in file_shapes(spec).items()}
    with HfFolderWriter(folder, announced, source, shard_size_mib, card, overwrite) as writer:
        tensors = itertools.chain.from_iterable(gatherer.gather(0))
        for name, tensor in fused_for_files(spec, tensors):
            writer.add(name, tensor)
