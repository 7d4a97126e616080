"""Runs of tensors that each trainer rank sends in a weight sync: an oracle, by the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.model.families import Rule, When
from rlmath.model.spec import padded_vocab_size
from rlmath.weights.pieces import hf_shapes, local_tensor, walk


@dataclass(frozen=True)
class SourceRank:
    """Pipeline stage, tensor rank (within experts for an expert) and expert rank."""

    pp: int
    tp: int
    ep: int


@dataclass(frozen=True)
class Gather:
    """A run of rows (``dim`` 0) or columns (1) of a Hugging Face tensor."""

    tensor: str
    rank: SourceRank
    dim: int
    start: int
    length: int
    numel: int


def planned_gathers(spec, actor):
    """Each byte once; the first rank sends the tensors that all have."""
    chunks = enumerate(actor.stage_chunks(spec.layers))
    stage_of = {layer: pp for pp, found in chunks for chunk in found for layer in chunk}
    sizes = hf_shapes(spec)
    for entry, layer, expert in walk(spec):
        if entry.when is When.tied:
            continue  # The last stage's copy of the embedding; the first stage sends the original.
        ep, ranks = 0, actor.tensor_parallel
        padded = padded_vocab_size(spec.vocab, ranks)
        if expert is not None:
            ep = expert // (spec.experts // actor.expert_parallel)
            ranks = actor.expert_tensor_parallel
        stage = _end_stage(entry, actor) if layer is None else stage_of[layer]
        for tp in range(1 if entry.rule is Rule.replicated else ranks):
            for one in local_tensor(entry, spec, tp, ranks, padded, layer, expert).pieces:
                size = sizes[one.hf_name]
                numel = math.prod(size) // size[one.dim] * one.length
                rank = SourceRank(stage, tp, ep)
                yield Gather(one.hf_name, rank, one.dim, one.hf_start, one.length, numel)


def _end_stage(entry, actor):
    return 0 if entry.megatron[0].startswith("embedding.") else actor.pipeline_parallel - 1
