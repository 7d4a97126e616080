"""Megatron's shards as vLLM's many-to-many backend (``nccl_m2n``) takes them: where they lie.

No rank gathers anything: each sends its own shard to the workers that hold a part of it. The
backend describes a side's ranks as a grid, with each tensor shared along one axis of it, which fits
tensor and data parallelism alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.m2n_common import (
    REPLICATE,
    REPLICATED,
    M2NMesh,
    M2NParamMeta,
)
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

from rlmath.weights.gather import BucketGatherer


class ShardSource(M2NWeightSource):
    """This rank's shards.

    Args:
        gatherer: This rank's, of a model without pipeline or expert parallelism.
    """

    def __init__(self, gatherer: BucketGatherer) -> None:
        self._gatherer = gatherer

    def mesh(self) -> M2NMesh:
        """Copies of the model by tensor ranks, which Megatron numbers first."""
        shards = self._gatherer.parallel.tp_size
        return M2NMesh((dist.get_world_size() // shards, shards), 0)

    def metadata(self) -> list[M2NParamMeta]:  # type: ignore[override]
        """Name, type, shape and place of each tensor; no communication."""
        return [
            M2NParamMeta(
                meta.name,
                meta.dtype,
                tuple(meta.shape),
                REPLICATED if dim is None else (REPLICATE, dim),
            )
            for meta, dim, _ in self._gatherer.own_shards()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass over the present values."""
        for meta, _, shard in self._gatherer.own_shards():
            yield meta.name, shard


def init_info(address: str, port: int, engines: int, ranks_per_engine: int) -> M2NTrainerInitInfo:
    """What a trainer rank starts from: where rank 0 listens, and the grid of workers."""
    trainers = dist.get_world_size()
    return M2NTrainerInitInfo(
        rank=dist.get_rank(),
        master_address=address,
        master_port=port,
        world_size=trainers + engines * ranks_per_engine,
        num_trainer_ranks=trainers,
        dst_mesh_dims=(engines, ranks_per_engine),
    )
