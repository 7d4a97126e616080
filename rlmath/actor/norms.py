"""Norms that Megatron lacks: over all heads together, and after a matrix."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm of queries or keys over all their heads, which are sharded over tensor ranks.

    Replaces Megatron's norm per head. ``hidden_size``: width of a head. ``heads``: number of heads
    of all tensor ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int
    ) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        if heads % ranks:
            raise ValueError(f"a norm of {heads} heads does not divide over {ranks} tensor ranks")
        self.width, self.eps, self.ranks = heads * hidden_size, eps, ranks
        self.weight = torch.nn.Parameter(torch.ones(self.width // ranks, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., heads of this rank, head_dim]`` in float32."""
        values = x.float()
        squares = values.square().sum((-2, -1), keepdim=True)
        if self.ranks > 1:
            # Summed over ranks in forward and backward: every rank's output depends on the sum.
            squares = reduce_from_tensor_model_parallel_region(squares)
            squares = copy_to_tensor_model_parallel_region(squares)
        normal = values * torch.rsqrt(squares / self.width + self.eps)
        return (normal * self.weight.view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """For Megatron's checkpoints: weights are sharded over tensor ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


def with_output_norm(linear: Any, norm: Any) -> Any:
    """A class of row-parallel matrices whose output is normalized by ``output_norm``. ``linear``:
    Megatron's or Transformer Engine's class of such a matrix. ``norm``: the norm's class."""

    class NormedRowLinear(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(*args, config=config, **kwargs)
            self.output_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

        def product(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, bias = self.product(*args, **kwargs)
            return self.output_norm(output), bias

    return NormedRowLinear
