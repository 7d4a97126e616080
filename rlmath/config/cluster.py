"""Settings of ``cluster``: devices and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmath.utils.setting import setting

Device = StrEnum("Device", ["auto", "cpu", "cuda"])
Placement = StrEnum("Placement", ["colocated", "separate"])


@dataclass
class ClusterConfig:
    device: Device = setting(Device.auto, "Device of the actor and the engines.")
    nodes: int = setting(1, "Number of nodes.", least=1, common=True)
    gpus_per_node: int = setting(1, "GPUs per node; ignored on CPU.", least=1, common=True)
    placement: Placement = setting(
        Placement.colocated,
        "colocated: engines and actor share GPUs and take turns; separate: each has its own GPUs. "
        "On CPU clusters the same applies to nodes.",
    )
    ray_address: str | None = setting(
        None, "Address of a running Ray cluster; null: start one for this run on this machine."
    )
    # The least that Ray starts with is about 75 MiB.
    object_store_mib: int | None = setting(
        None, "Size of Ray's object store, in MiB; null: Ray's default.", least=80
    )
