"""Processes under Nsight Systems, by Ray's plug-in for it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# nsys records from cudaProfilerStart to cudaProfilerStop, each time into a separate file, and
# leaves the process running at the end of the range, where it would end it by default.
OPTIONS = {
    "t": "cuda,nvtx,cudnn,cublas",
    "s": "none",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "kill": "none",
    "force-overwrite": "true",
}
_PLAIN = re.compile(r"[^A-Za-z0-9_./%-]")


def under_nsys(output: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Ray's ``runtime_env`` of an actor whose process runs under Nsight Systems.

    Args:
        output: Absolute path of the reports, without their suffix. nsys numbers them; the number of
            the process is added, so that those of an earlier start stay.
    """
    # A shell reads Ray's command, which runs the `python` that is first on PATH.
    path = _PLAIN.sub(lambda match: f"\\{match[0]}", f"{output}_%p")
    folder = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return {"env_vars": {**variables, "PATH": folder}, "nsight": {**OPTIONS, "o": path}}
