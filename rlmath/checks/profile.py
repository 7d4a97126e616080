from __future__ import annotations

import shutil
from collections.abc import Iterator

from rlmath.checks.machine import Machine
from rlmath.config.profile import ProfileTool
from rlmath.config.schema import Config


def profile_problems(config: Config, machine: Machine) -> Iterator[str]:
    """The steps are steps of the run, and the tool is installed."""
    profile, last = config.runner.profile, config.runner.steps
    steps = list(map(str, profile.steps))
    for step in profile.steps:
        if not 1 <= step <= last:
            yield (
                f"runner.profile.steps=[{', '.join(steps)}]: the run has no step {step}; its steps "
                f"are 1 to {last} (runner.steps)"
            )
    local = config.cluster.ray_address is None and not machine.elsewhere
    if profile.steps and profile.tool is ProfileTool.nsys and local and not shutil.which("nsys"):
        yield (
            "runner.profile.tool=nsys: there is no nsys on PATH; install Nsight Systems, or use "
            "torch"
        )
