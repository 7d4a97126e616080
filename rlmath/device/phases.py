"""Names of phases in traces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Rank = TypeVar("Rank")
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Rank, P], R]


def phase(name: str) -> Callable[[Method[Rank, P, R]], Method[Rank, P, R]]:
    """Let traces of torch and of Nsight Systems show a method of a rank as a phase. ``name``: as in
    the metric ``timing/...``."""

    def with_range(method: Method[Rank, P, R]) -> Method[Rank, P, R]:
        @functools.wraps(method)
        def in_range(rank: Rank, *args: P.args, **kwargs: P.kwargs) -> R:
            import torch

            # torch without CUDA has no NVTX.
            has_nvtx = torch.version.cuda is not None
            nvtx = torch.cuda.nvtx.range(name) if has_nvtx else contextlib.nullcontext()
            with torch.profiler.record_function(name), nvtx:
                return method(rank, *args, **kwargs)

        return in_range

    return with_range
