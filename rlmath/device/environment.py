"""Environment variables that a Megatron rank needs before torch, CUDA and NCCL start."""

from __future__ import annotations

import os

from rlmath.device.flight_recorder import recorder_environment
from rlmath.model.parallel import Layout

# A CPU rank takes and gives back megabytes with each operator. The C library keeps up to 256 MiB of
# them, in pages of 2 MiB where the kernel leaves that to the program.
MEMORY_IN_HUGE_PAGES = (
    f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={256 * 2**20}"
)

# For bit-identical runs. cuBLAS picks algorithms by workspace and without a fixed one may add
# partial products in any order; Transformer Engine's attention adds gradients atomically unless
# told not to, and Megatron's deterministic mode requires that setting; NVLink SHARP sums in the
# switch, in the order of arrival.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "^NVLS",
}

# Variables of torch's allocator; the first takes precedence.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"

# Warnings of libraries that no reader of a rank's log can act on, and that each rank repeats.
QUIET = ",".join(
    (
        "ignore::FutureWarning",
        "ignore::DeprecationWarning",
        # Megatron's fallbacks; whether Transformer Engine is required is checked earlier.
        "ignore:Transformer Engine and Apex are not installed:UserWarning",
        "ignore:Apex is not installed:UserWarning",
    )
)


def rank_environment(
    device: str,
    *,
    num_threads: int | None,
    layout: Layout,
    batch_invariant: bool,
    shares_gpus: bool = False,
    log_dir: str = "logs",
) -> dict[str, str]:
    """Environment variables of a rank's process, which CUDA reads when its context is created.

    Args:
        num_threads: Threads of one CPU operator (CPU only).
        shares_gpus: Whether engines are on the ranks' GPUs and read weights from ranks' memory.
        log_dir: Folder of the ranks' output, to which they write the collectives they entered.
    """
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", QUIET),
    }
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = str(num_threads or 1)
        environment["GLIBC_TUNABLES"] = MEMORY_IN_HUGE_PAGES
        return environment
    environment |= recorder_environment(log_dir)
    # Megatron's tensor-parallel layers, and Transformer Engine's context-parallel attention, issue
    # a collective before the product that it overlaps with, and rely on one hardware queue to keep
    # that order. Without either, more queues let gradients' collectives overlap with the backward
    # pass, so CUDA's default stays.
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if layout.tensor_parallel > 1 or layout.context_parallel > 1:
        environment[name] = os.environ.get(name, "1")
    if batch_invariant:
        environment |= DETERMINISTIC
    if shares_gpus:
        environment |= _without_expandable_segments()
    return environment


def _without_expandable_segments() -> dict[str, str]:
    """The user's settings of torch's allocator with expandable segments removed.

    CUDA passes such memory to another process as a file descriptor, fetched with ``pidfd_getfd``:
    most containers forbid it, and so do kernels that restrict ptrace.
    """
    found = {}
    for name in ALLOCATOR:
        fields = [field.strip() for field in os.environ.get(name, "").split(",")]
        asked = [field for field in fields if field.partition(":")[0].strip() == _EXPANDABLE]
        if asked:
            others = [field for field in fields if field and field not in asked]
            found[name] = ",".join([*others, f"{_EXPANDABLE}:False"])
    return found
