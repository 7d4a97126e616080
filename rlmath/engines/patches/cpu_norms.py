"""vLLM's RMSNorm on CPU by the kernels that vLLM has compiled for it.

vLLM 0.32 builds them for CPUs but offers them to its layers on GPUs only, and composes the norm of
seven operators instead. Importing this module, in a process that runs vLLM on a CPU, offers them
there as well; ``PRIORITY`` chooses them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "rlmath_cpu"
# A value of ``EngineArgs.ir_op_priority``.
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}

current_platform.import_kernels()


def _takes(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same_dtype = weight is not None and weight.dtype == x.dtype
    return variance_size is None and same_dtype and x.is_contiguous()


def _takes_add(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _takes(x, weight, epsilon, variance_size) and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """``[n, d]`` normalized; see vLLM's operator of this name."""
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_add, inplace=True)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``x + x_residual``, normalized, and the sum; both in the place of the inputs."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
