"""The node: driver, GPUs, their links, and the versions that everything else depends on."""

from __future__ import annotations

import importlib

from rlmath.commands.doctor import examine
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.utils import transformer_engine as te_install

# NVIDIA's table of CUDA 13's minor version compatibility: the oldest driver that runs it.
LEAST_DRIVER = 580


def run(node: Node, record: Record) -> None:
    """Report the machine; a fault that prevents a run is a problem."""
    te_install.use_packaged_libraries()
    if node.on_cuda:
        _gpus(record)  # Before this process, too, takes memory of one.
    with record.phase("rlmath doctor"):
        for finding in examine(None):
            record.figure(finding.subject, finding.text)
            record.require(finding.level != "bad", f"{finding.subject}: {finding.text}")
    _versions(record)
    if not node.on_cuda:
        why = "no GPU, or torch is a build without CUDA"
        for part in ("driver", "topology", "NCCL and cuDNN", "Transformer Engine"):
            record.not_applicable(part, why)


def _versions(record: Record) -> None:
    for module in ("torch", "vllm", "megatron.core", "ray", "transformers"):
        with record.phase(f"import {module}"):
            found = importlib.import_module(module)
        record.figure(module, found.__version__, key=module in ("torch", "vllm"))


def _gpus(record: Record) -> None:
    from rlmath.device.nvidia import gpu_states, topology

    states = gpu_states()
    record.require(
        bool(states),
        "nvidia-smi names no GPU that may be used",
        "Install the driver, or give the container GPUs (docker run --gpus all); see "
        "CUDA_VISIBLE_DEVICES.",
    )
    for state in states:
        record.figure(f"GPU {state.index}", f"{state.name}, {state.uuid}")
        record.figure(f"GPU {state.index} memory", state.total_mib / 1024, "GiB")
        record.figure(f"GPU {state.index} in use", state.used_mib / 1024, "GiB")
        record.require(
            state.used_mib < 0.1 * state.total_mib,
            f"{state.used_mib} of {state.total_mib} MiB of GPU {state.index} are in use already",
            "Other processes compute on it: see nvidia-smi, and wait for them or end them.",
        )
    for driver in {state.driver for state in states}:
        record.figure("driver", driver, limit=f">= {LEAST_DRIVER}", key=True)
        record.require(
            int(driver.split(".")[0]) >= LEAST_DRIVER,
            f"driver {driver} is older than {LEAST_DRIVER}, which the CUDA 13 build needs",
            f"Install an NVIDIA driver of branch {LEAST_DRIVER} or later on the host.",
        )
    record.text("nvidia-smi topo -m", topology())
