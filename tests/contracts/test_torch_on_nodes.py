"""Parts of torch that runs over GPUs and nodes rely on: a GPU's location, records of NCCL."""

import mmap
from pathlib import Path

import torch

from rlmath.device.flight_recorder import recorder_environment


def test_torch_reads_the_variables_of_its_flight_recorder():
    """Reads compiled code: the CPU build has what is common, and NCCL's header."""
    folder = Path(torch.__file__).parent
    header = folder / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    with (folder / "lib/libtorch_cpu.so").open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for name in recorder_environment("logs"):
            found = library.find(name.encode()) >= 0 or f'"{name}"' in header.read_text()
            assert found, f"torch reads no {name}: rlmath/device/flight_recorder.py"
