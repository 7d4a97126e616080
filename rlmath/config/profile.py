"""Settings of ``runner.profile``: steps that are profiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlmath.utils.setting import NotWith, OnlyWith, setting

# In the folder of a run.
PROFILE_FOLDER = "profile"


class ProfileTool(Enum):
    torch = "torch"
    nsys = "nsys"
    memory = "memory"


@dataclass
class ProfileConfig:
    steps: list[int] = setting(
        list, "Steps to profile, such as [5, 6]; traces are written to profile/ in run_dir."
    )
    tool: ProfileTool = setting(
        ProfileTool.torch,
        "torch: operators, kernels and memory of ranks and engines, as Chrome traces. nsys: Nsight "
        "Systems, under which ranks and engines then start. memory: allocations of each rank's "
        "GPU with their origin, for pytorch.org/memory_viz.",
        only_with=OnlyWith("steps", words="not empty"),
        not_with=(
            NotWith(
                "cluster.device=cpu",
                "Nsight Systems records from cudaProfilerStart to cudaProfilerStop",
                "use torch",
                "nsys",
            ),
            NotWith(
                "cluster.device=cpu",
                "it records PyTorch's CUDA allocator",
                "use torch, whose trace has the allocations of a CPU",
                "memory",
            ),
        ),
    )
