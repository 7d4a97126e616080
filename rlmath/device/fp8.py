"""Support of FP8 products by this process's GPU (``actor.fp8``)."""

from __future__ import annotations

import torch

from rlmath.errors import UserError
from rlmath.model.fp8_training import BLOCKWISE_CUDA, Fp8Training, capability_problem


def require_fp8(fp8: Fp8Training) -> None:
    """Refuse a GPU or a CUDA version for which Transformer Engine has no FP8 products.

    Transformer Engine would fail with an assertion in the first forward pass. Raises UserError:
    they do not suffice; the message names the versions and what is needed.
    """
    problem = capability_problem(fp8, torch.cuda.get_device_capability())
    if problem is not None:
        raise UserError(problem)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if fp8.recipe == "blockwise" and cuda < BLOCKWISE_CUDA:
        needed = ".".join(map(str, BLOCKWISE_CUDA))
        raise UserError(
            f"actor.fp8_recipe=blockwise: cuBLAS multiplies blocks from CUDA {needed}, and torch "
            f"is built for {torch.version.cuda}; use tensorwise, or actor.fp8=none"
        )
