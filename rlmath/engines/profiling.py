"""Profilers of vLLM's engines, for ``runner.profile``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.profile import ProfileTool

# Steps of an engine that are recorded, from the first of a profiled step of the run: all of a
# rollout would be gigabytes.
MAX_STEPS = 64


@dataclass(frozen=True)
class EngineProfile:
    tool: ProfileTool  # torch or nsys.
    folder: Path  # Absolute, for the traces.


def profiler_arguments(profile: EngineProfile | None) -> dict[str, Any]:
    """Arguments of vLLM's engine with which it can be profiled. Imports vLLM."""
    if profile is None:
        return {}
    from vllm.config import ProfilerConfig

    if profile.tool is ProfileTool.nsys:
        return {"profiler_config": ProfilerConfig(profiler="cuda", max_iterations=MAX_STEPS)}
    return {
        "profiler_config": ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=str(profile.folder),
            torch_profiler_with_stack=False,
            torch_profiler_dump_cuda_time_total=False,
            ignore_frontend=True,
            max_iterations=MAX_STEPS,
        )
    }
