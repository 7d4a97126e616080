"""Settings of ``weights``: the weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlmath.utils.setting import setting


class Transport(Enum):
    auto = "auto"
    shared_memory = "shared_memory"
    object_store = "object_store"
    ipc = "ipc"
    nccl = "nccl"
    nccl_m2n = "nccl_m2n"


@dataclass
class WeightsConfig:
    transport: Transport = setting(
        Transport.auto,
        "Transport of the weight sync. auto: shared_memory on one CPU node, object_store (Ray) on "
        "several, ipc on CUDA if engines share the actor's GPUs, nccl otherwise. nccl_m2n replaces "
        "nccl: every rank sends its own shards; it requires nccl-extensions and no pipeline or "
        "expert parallelism.",
    )
    bucket_size_mib: int = setting(512, "Bucket size of the weight sync.", least=1)
    verify_every: int | None = setting(
        None,
        "Compare a fingerprint of every tensor in the engines with the actor's at the first three "
        "weight syncs after engines start and every N syncs; a difference stops the run. null: as "
        "often as takes at most 0.5 % of the run's time, and at least every 50 syncs; 0: never.",
        least=0,
    )
