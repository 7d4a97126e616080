"""Settings of ``weights``: the weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.utils.setting import setting

# A bucket's size on a CPU, and the least on CUDA if the setting leaves it open.
BUCKET_MIB = 512
# On CUDA: the most, and the share of the weights that it is between the two. A call for each bucket
# takes milliseconds, and a rank holds up to five buckets beside its weights.
MOST_BUCKET_MIB, BUCKET_SHARE = 2048, 1 / 64


def bucket_mib(given: int | None, weights_bytes: int, *, cuda: bool = True) -> int:
    """MiB of a bucket of the weight sync; ``weights_bytes``: of the whole model as it is sent."""
    if given is not None:
        return given
    if not cuda:
        return BUCKET_MIB
    return min(max(int(weights_bytes * BUCKET_SHARE / 2**20), BUCKET_MIB), MOST_BUCKET_MIB)


@dataclass
class WeightsConfig:
    transport: str = setting(
        "auto",
        "Transport of the weight sync: shared_memory, ipc, nccl or your own. auto: shared_memory "
        "on CPU, ipc on CUDA if engines share the actor's GPUs, nccl otherwise.",
    )
    transport_options: dict[str, Any] = setting(dict, "Options of your own transport.")
    bucket_size_mib: int | None = setting(
        None,
        f"Bucket size of the weight sync; null: {BUCKET_MIB} on CPU, on CUDA a 64th of the "
        f"weights, from {BUCKET_MIB} to {MOST_BUCKET_MIB} (from 69 billion parameters on).",
        least=1,
    )
    verify_every: int | None = setting(
        None,
        "Compare a fingerprint of every tensor in the engines with the actor's at the first three "
        "weight syncs after engines start and every N syncs; a difference stops the run. null: at "
        "every sync, of as much of the weights in turn as takes at most 0.5 % of the run's time; "
        "0: never.",
        least=0,
    )
