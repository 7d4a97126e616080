"""Cores beside a GPU, where a process launches its kernels and fills its pinned buffers.

Memory is on the socket of the thread that writes it first, so buffers follow their thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# PCI codes: NVIDIA, and the class of display and 3D controllers.
_VENDOR, _DISPLAY = "0x10de", "0x03"
# A rank and an engine share a GPU, and each has helpers that run beside its main thread.
PROCESSES_PER_GPU = 2
MOST_THREADS = 16


@dataclass(frozen=True)
class Cores:
    """A process's share of a node."""

    # Cores that it may use: those of the GPU's socket, or all if that is unknown.
    ids: frozenset[int]
    threads: int  # Threads for one of its operators.


def cores_beside(bus_id: str, allowed: frozenset[int], sys_root: Path = Path("/sys")) -> Cores:
    """Cores for a process that uses a GPU. ``bus_id``: PCI address of the GPU, as sysfs names it:
    ``0000:1b:00.0``. ``allowed``: cores that the process may use now."""
    devices = sys_root / "bus" / "pci" / "devices"
    own = _read(devices / bus_id / "local_cpulist")
    ids = _parse(own) & allowed if own else frozenset()
    gpus = [
        folder
        for folder in (devices.iterdir() if devices.is_dir() else [])
        if _read(folder / "vendor") == _VENDOR and _read(folder / "class").startswith(_DISPLAY)
    ]
    if ids:
        gpus = [folder for folder in gpus if _read(folder / "local_cpulist") == own]
    ids = ids or allowed
    threads = len(ids) // max(1, len(gpus)) // PROCESSES_PER_GPU
    return Cores(ids, min(MOST_THREADS, max(1, threads)))


def bind_to_gpu(index: int) -> int:
    """Bind this thread and those that it starts to the cores beside a GPU. ``index``: index of the
    GPU in this process. Returns threads for one operator."""
    import torch

    gpu = torch.cuda.get_device_properties(index)
    bus_id = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cores = cores_beside(bus_id, frozenset(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores.ids)
    return cores.threads


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def _parse(text: str) -> frozenset[int]:
    """Parse a list of cores: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
