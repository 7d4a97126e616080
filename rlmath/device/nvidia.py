"""State of this machine's GPUs from ``nvidia-smi``, without starting CUDA.

Without a driver every function returns an empty value.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rlmath.utils.nvidia_driver import output_of, query


@dataclass(frozen=True)
class GpuState:
    index: int
    uuid: str  # GPU-....
    name: str  # Such as NVIDIA H100 80GB HBM3.
    driver: str
    total_mib: int
    used_mib: int  # Memory in use by any process.


def gpu_states() -> list[GpuState]:
    """Every GPU that this process may use (``CUDA_VISIBLE_DEVICES``)."""
    rows = query("--query-gpu=index,uuid,name,driver_version,memory.total,memory.used")
    states = [
        GpuState(int(index), uuid, name, driver, _mib(total), _mib(used))
        for index, uuid, name, driver, total, used in rows
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return states
    names = [name.strip() for name in visible.split(",")]
    return [state for state in states if str(state.index) in names or state.uuid in names]


def process_counts() -> dict[str, int]:
    """Number of processes that compute on each GPU, by its uuid. They are counted, not named, as
    containers hide the process ids of others."""
    counts: dict[str, int] = {}
    for uuid, _ in query("--query-compute-apps=gpu_uuid,pid"):
        counts[uuid] = counts.get(uuid, 0) + 1
    return counts


def ecc_fault(gpu: str) -> str:
    """Why a GPU needs a reset or a replacement, by its ECC state; empty if it needs neither or
    keeps no count. ``gpu``: its number or uuid."""
    fields = "ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
    rows = query(f"--query-gpu={fields}", f"--id={gpu}")
    errors, pending, failure = rows[0] if rows and len(rows[0]) == 3 else ("", "", "")
    if failure == "Yes":
        return "it has no spare rows left for failed memory, and has to be replaced"
    if pending == "Yes":
        return "failed memory is to be remapped, which a reset does (nvidia-smi --gpu-reset)"
    if _mib(errors):
        return f"{errors} uncorrected ECC errors since its driver was loaded"
    return ""


def xids(gpu: str) -> list[int]:
    """The driver's error codes (XID) for a GPU in the kernel's log, if this process may read it;
    for every GPU if the driver no longer knows this one. ``gpu``: its number or uuid."""
    rows = query("--query-gpu=pci.bus_id", f"--id={gpu}")
    # nvidia-smi prints 00000000:1B:00.0, the log 0000:1b:00.
    bus = rows[0][0].lower()[4:].partition(".")[0] if rows else ""
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-f:]+)[^)]*\): (\d+)", output_of("dmesg"))
    return list(dict.fromkeys(int(code) for at, code in found if bus in ("", at)))


def topology() -> str:
    """The driver's table of the links between GPUs and network cards."""
    return re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m"))


def current_gpu_uuid() -> str:
    """UUID of the GPU that this process computes on, which starts CUDA; "" on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _mib(text: str) -> int:
    """A number of MiB; 0 where the driver gives none, as it may for parts of a GPU."""
    return int(text) if text.isdigit() else 0
