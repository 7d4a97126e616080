"""A few elements of the gradients, summed over data-parallel ranks a second time.

Without the sum every rank trains on its own sequences alone. With the distributed optimizer no copy
of the weights differs then, as each rank's part of them is gathered by all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.step_probe import GRADIENT_SUM, StepFinding

MAX_TENSORS, ELEMENTS = 16, 8
# Of the sum of sizes: ranks add up float32 in another order.
TOLERANCE = 1e-4


class GradientSums:
    """Compares gradients after Megatron's reduction with those before it. Collective.

    Args:
        models: Chunks in Megatron's data-parallel wrapper.
        group: Of the ranks whose gradients are summed.
    """

    def __init__(self, models: Sequence[Any], group: Any) -> None:
        self._models, self._group = list(models), group
        self._own: Tensor | None = None

    @torch.no_grad()
    def before(self) -> None:
        """This rank's gradients are complete, and not reduced."""
        self._own = self._read()

    @torch.no_grad()
    def after(self) -> StepFinding:
        """The gradients are reduced; with the distributed optimizer each element is on one rank."""
        own, self._own = self._own, None
        if own is None:
            return StepFinding(GRADIENT_SUM, math.nan, math.nan)
        if not own.numel():
            return StepFinding()
        wanted, sizes, now = own.clone(), own.abs(), self._read()
        for one in (wanted, sizes):
            dist.all_reduce(one, group=self._group)
        off = (now - wanted).abs()
        dist.all_reduce(off, op=dist.ReduceOp.MIN, group=self._group)
        # NaN is reported elsewhere, and is no sum.
        wrong = off > TOLERANCE * sizes + 1e-30
        if not bool(wrong.any()):
            return StepFinding()
        place = int((off * wrong).argmax())
        return StepFinding(GRADIENT_SUM, float(now[place]), float(wanted[place]))

    def _read(self) -> Tensor:
        found = [_spread(one) for one in self._gradients()]
        return torch.cat(found) if found else torch.zeros(0)

    def _gradients(self) -> Iterator[Tensor]:
        """Of matrices that no other group of ranks sums: neither experts nor shared embeddings."""
        every = [
            parameter.main_grad
            for model in self._models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and parameter.dim() > 1
            and getattr(parameter, "allreduce", True)
            and not any(part in name for part in ("embedding", "output_layer", "router"))
        ]
        yield from every[:: max(1, -(-len(every) // MAX_TENSORS))]


def _spread(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].double()
