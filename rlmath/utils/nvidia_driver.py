"""The machine's NVIDIA driver, from ``nvidia-smi``. Does not import torch."""

from __future__ import annotations

import subprocess

# Minimum driver for the CUDA 13 of requirements/cuda.lock; older ones load it and find no device.
LEAST_DRIVER = 580
TIMEOUT_S = 30.0


def driver_version() -> str | None:
    """Such as ``580.65.06``; ``None`` without ``nvidia-smi``, or if it finds no driver."""
    found = _numbers("driver_version")
    return found[0] if found else None


def compute_capability() -> tuple[int, int] | None:
    """The lowest of this machine's GPUs, such as ``(9, 0)``; ``None`` if unknown.

    Includes GPUs that ``CUDA_VISIBLE_DEVICES`` hides: they are mostly alike.
    """
    pairs = [one.split(".") for one in _numbers("compute_cap")]
    return min(((int(major), int(minor)) for major, minor in pairs), default=None)


def query(*what: str) -> list[list[str]]:
    """The cells of each line of ``nvidia-smi``'s table; none without it, or if it fails."""
    text = output_of("nvidia-smi", *what, "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def output_of(*command: str) -> str:
    """What a program prints; empty without it, or if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _numbers(field: str) -> list[str]:
    """A number, maybe with dots, for each GPU; none if ``nvidia-smi`` prints something else."""
    found = [row[0] for row in query(f"--query-gpu={field}")]
    return found if all(one[:1].isdigit() for one in found) else []


def is_too_old(version: str) -> bool:
    """Whether CUDA 13 cannot run on this driver."""
    return int(version.partition(".")[0]) < LEAST_DRIVER


def why_no_device(cuda: str | None) -> str:
    """Why torch sees no CUDA device, as far as the driver shows, and how to fix it. ``cuda``:
    ``torch.version.cuda``; ``None``: a build without CUDA."""
    if cuda is None:
        return (
            "torch is a build without CUDA; install the CUDA build with "
            "`bash launchers/setup.sh cuda`"
        )
    version = driver_version()
    if version is None:
        return (
            "nvidia-smi is not there or finds no driver; install an NVIDIA driver of version "
            f"{LEAST_DRIVER} or newer, and in a container pass the GPUs on (docker run --gpus all)"
        )
    if is_too_old(version):
        return (
            f"the NVIDIA driver is {version}, and CUDA {cuda} needs {LEAST_DRIVER} or newer: "
            "update the driver"
        )
    return (
        f"the NVIDIA driver {version} is new enough for CUDA {cuda}; look at CUDA_VISIBLE_DEVICES "
        "and at what nvidia-smi says of the GPUs"
    )
