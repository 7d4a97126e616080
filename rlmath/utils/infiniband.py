"""InfiniBand and RoCE for NCCL, which silently falls back to TCP if something is missing."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

LIBRARY = "libibverbs.so.1"
# linux/capability.h; a process with this capability can lock memory without a limit.
_CAP_IPC_LOCK = 14


def adapters(sys_root: Path = Path("/sys")) -> list[str]:
    """Names of adapters with an active port, such as ``mlx5_0``. Containers see the host's.
    ``sys_root``: mount point of sysfs."""
    folder = sys_root / "class" / "infiniband"
    return sorted(
        adapter.name
        for adapter in (folder.iterdir() if folder.is_dir() else [])
        if any("ACTIVE" in port.read_text() for port in adapter.glob("ports/*/state"))
    )


def problems(dev_root: Path = Path("/dev"), library: str = LIBRARY) -> Iterator[str]:
    """Reasons why this process cannot use the adapters, each with how to fix it. ``dev_root``:
    folder of device files. ``library``: the library that NCCL loads."""
    try:
        ctypes.CDLL(library)
    except OSError:
        yield f"{library} is not installed (apt-get install libibverbs1 ibverbs-providers)"
    if not list((dev_root / "infiniband").glob("uverbs*")):
        yield (
            f"{dev_root}/infiniband has no uverbs device; a container needs "
            "docker run --device=/dev/infiniband --network=host"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not locks_without_limit():
        yield (
            f"at most {limit / 2**20:g} MiB may be locked (ulimit -l), and buffers of NCCL have to "
            "be; set it to unlimited (docker run --ulimit memlock=-1 --cap-add=IPC_LOCK)"
        )


def locks_without_limit() -> bool:
    """Whether this process has CAP_IPC_LOCK."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
