"""Probe of a GPU, run on each reserved GPU before ranks and engines are placed.

A failed GPU is free, so Ray offers it again to the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import torch

from rlmath.device import nvidia

PROBE_TIMEOUT_S = 120.0
# [side, side] float32 are 1 MiB. Products of such small integers are exact, also in TF32.
SIDE, LARGEST = 512, 8


@dataclass(frozen=True)
class GpuReport:
    host: str  # Name of its node, Slurm's if there is one.
    gpu: str  # Its name on the node.
    fault: str  # Description of the fault; empty if it works.

    def describe(self) -> str:
        return f"GPU {self.gpu} of {self.host}: {self.fault}"


def probe(gpu: str, timeout_s: float = PROBE_TIMEOUT_S) -> GpuReport:
    """Probe the first visible GPU in a child process, since a hung GPU hangs its caller.
    ``timeout_s``: time after which it counts as hung."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    fault = nvidia.ecc_fault(gpu) or _fault_of(
        [sys.executable, "-W", "ignore", "-m", "rlmath.device.gpu_probe"], timeout_s
    )
    if fault and (xids := nvidia.xids(gpu)):
        fault += f" (XID {', '.join(map(str, xids))} in the kernel's log)"
    return GpuReport(host, gpu, fault)


def _fault_of(command: list[str], timeout_s: float) -> str:
    """Run a program; the last line of its output if it fails, else an empty text."""
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        _, said = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # It may wait in the driver.
            child.wait(1)
        return f"it did not answer within {timeout_s:g} s"
    if child.returncode == 0:
        return ""
    lines = said.strip().splitlines()
    return lines[-1] if lines else f"the probe ended with code {child.returncode}"


def check(device: torch.device) -> None:
    """Copy 1 MiB to a device and back, and multiply it there. Raises RuntimeError: CUDA's error, or
    a result that differs from the CPU's."""
    generator = torch.Generator().manual_seed(0)
    here = torch.randint(-LARGEST, LARGEST, (SIDE, SIDE), generator=generator).float()
    there = here.to(device)
    if not torch.equal(there.cpu(), here):
        raise RuntimeError("1 MiB copied to it and back has changed")
    if not torch.equal((there @ there).cpu(), here @ here):
        raise RuntimeError("it multiplies wrongly")


if __name__ == "__main__":
    try:
        check(torch.device("cuda"))
    except RuntimeError as error:
        # The first line is the error; the others are advice.
        sys.exit(f"{type(error).__name__}: {str(error).splitlines()[0]}")
