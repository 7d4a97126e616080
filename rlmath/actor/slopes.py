"""The gradient against the slope of log-probs that forward passes alone measure.

Whatever else compares gradients takes the backward pass below the log-probs as it is. Here one
sequence of each data-parallel rank goes forward with weights that are moved a little to both sides,
a group of tensors at a time: the log-probs must change by the gradient times the move. In float32
all elements move by random signs, which shows a part without a gradient as well. Rounding to
bfloat16 hides what such a move does; there the weights move along the gradient, which shows its
size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.step_probe import OTHER_SLOPE, StepFinding

# Names of the tensors of each group; a tensor belongs to the first.
GROUPS = {
    "embedding and output layer": r"embedding|output_layer",
    "attention": r"self_attention|input_layernorm",
    "other tensors": "",
}
# Change of a sum of log-probs, in nats: in float32 by random signs, times the root of the number of
# tokens; else along the gradient, times that number. At most this part of the mean log-prob: tokens
# that are nearly certain have no more to gain, and lose far more than their gradient says.
BY_SIGNS, ALONG, MOST_OF_MEAN = 2e-3, 0.1, 0.1
# Largest move of an element by signs; beyond it the gradient is too small to be judged.
MOST = 1e-2
# Part of the change that the gradient predicts; with random signs, of the usual size of theirs.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.4}
# Moves that must agree on a fault, to within this part of it: noise and curvature do not.
MOVES, AGREE = (1.0, 2.0, 4.0), 0.5
# Elements that are in float32 at once, several times: of a whole embedding that is 12 GB for 7B.
ELEMENTS_AT_ONCE = 1 << 22


class Slopes:
    """Measures slopes of a rank's model. Collective over all ranks. ``chunks``: with reduced
    gradients of a sum of log-probs. ``optimizer``: Megatron's, which says what is reduced here.
    ``dtype``: of the model, as a stage may begin with a parameter of another. ``run``: forward
    passes; returns the sum and the number of the log-probs that this rank reports."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        dtype: torch.dtype,
        run: Callable[[], tuple[float, int]],
    ) -> None:
        self._run, self._dtype = run, dtype
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._groups: dict[str, list[Any]] = {name: [] for name in GROUPS}
        for chunk in chunks:
            for name, one in chunk.named_parameters():
                if one.requires_grad:
                    words = next(k for k, v in GROUPS.items() if re.search(v, name))
                    self._groups[words].append(one)
        self._device = next(iter(chunks[0].parameters())).device
        self._along = dtype is not torch.float32

    @torch.no_grad()
    def finding(self) -> StepFinding:
        """The first group whose gradient is not the slope."""
        log_probs, tokens = self._sum(*self._run())
        for name, parameters in self._groups.items():
            (square,) = self._sum(self._product(parameters))
            scale = self._scale(square, log_probs, tokens)
            residues: list[float] = []
            for move in MOVES if scale else ():
                slope, wanted = self._measure(parameters, scale * move)
                size = abs(wanted) if self._along else scale * move * math.sqrt(square)
                # NaN is reported elsewhere.
                if not abs(slope - wanted) > TOLERANCE[self._dtype] * size:
                    break
                residues.append((slope - wanted) / size)
            else:
                spread = max(residues, default=0.0) - min(residues, default=0.0)
                if residues and spread <= AGREE * max(map(abs, residues)):
                    return StepFinding(OTHER_SLOPE, wanted, slope, name)
        return StepFinding()

    def _scale(self, square: float, log_probs: float, tokens: float) -> float:
        """Factor of the signs, or of the gradient; 0: there is no gradient, or no move is small
        enough. ``square``: of the gradient's norm. ``log_probs``: their sum."""
        if not 0.0 < square < math.inf:
            return 0.0
        most = MOST_OF_MEAN * abs(log_probs) / tokens
        if self._along:
            return min(ALONG, most) * tokens / square
        scale = min(BY_SIGNS, most) * math.sqrt(tokens / square)
        return scale if scale <= MOST else 0.0

    def _measure(self, parameters: Sequence[Any], scale: float) -> tuple[float, float]:
        """Change of the log-probs when the tensors move, and the change by the gradient."""
        kept = [one.detach().to("cpu", copy=True) for one in parameters]
        try:
            self._move(parameters, kept, scale)
            above = self._run()[0]
            self._move(parameters, kept, -scale)
            below = self._run()[0]
            wanted = self._product(parameters, kept, scale)
        finally:
            for one, own in zip(parameters, kept, strict=True):
                one.copy_(own)
        slope, wanted = self._sum((above - below) / 2, wanted)
        return slope, wanted

    def _move(self, parameters: Sequence[Any], kept: Sequence[Tensor], scale: float) -> None:
        for one, own in zip(parameters, kept, strict=True):
            after = self._weights_after(one, own, scale)
            for block in _blocks(one):
                one.view(-1)[block] = next(after)

    def _weights_after(self, parameter: Any, own: Tensor, scale: float) -> Iterator[Tensor]:
        """The parameter's own weights after a move, block by block. Collective with a distributed
        optimizer."""
        # Ranks that have the same tensor move it alike; the two of a tied embedding as well.
        draw = torch.Generator(parameter.device).manual_seed(hash(tuple(parameter.shape)) % 2**31)
        for block in _blocks(parameter):
            weight = own.view(-1)[block].to(parameter.device).float()
            noise = torch.rand(weight.shape, generator=draw, device=parameter.device).sub_(0.5)
            if not self._along:
                yield noise.sign_().mul_(-scale).add_(weight)
                continue
            # Rounded at random, as most of the gradient is smaller than a rounding.
            noise.mul_(weight.abs()).mul_(2.0**-7).add_(weight)
            noise.add_(self._gradient(parameter, block), alpha=scale)
            yield noise.to(parameter.dtype)

    def _product(
        self, parameters: Sequence[Any], kept: Sequence[Tensor] | None = None, scale: float = 0.0
    ) -> float:
        """This rank's part of the gradient's product with itself, or with half of the way from the
        parameters, which have moved by ``-scale``, to those moved by ``scale``."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

        first = not parallel_state.get_data_parallel_rank(with_context_parallel=True)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for place, one in enumerate(parameters):
            counts = param_is_not_shared(one) and param_is_not_tensor_parallel_duplicate(one)
            high = None if kept is None else self._weights_after(one, kept[place], scale)
            for block in _blocks(one):
                # Collective with a distributed optimizer.
                gradient = other = self._gradient(one, block)
                if high is not None:
                    other = next(high).float().sub_(one.view(-1)[block]).mul_(0.5)
                if first and counts:
                    total += (gradient * other).sum(dtype=torch.float64)
        return float(total)

    def _gradient(self, parameter: Any, block: slice) -> Tensor:
        """Elements of the whole reduced gradient; the distributed optimizer reduces each part on
        one rank."""
        from megatron.core import parallel_state

        gradient: Tensor = parameter.main_grad.view(-1)[block]
        parts = [one for one in self._parts if hasattr(one, "model_param_gbuf_map")]
        if not parts:
            return gradient
        whole = torch.zeros_like(gradient)
        for part in parts:
            # A rank that owns no element of the parameter does not have it here.
            if parameter in part.model_param_gbuf_map:
                own = part._get_model_param_range_map(parameter)["param"]
                inside = slice(*(max(0, end - block.start) for end in (own.start, own.end)))
                whole[inside] = gradient[inside]
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(whole, group=group)
        return whole

    def _sum(self, *mine: float) -> list[float]:
        total = torch.tensor(mine, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found


def _blocks(parameter: Tensor) -> Iterator[slice]:
    for start in range(0, parameter.numel(), ELEMENTS_AT_ONCE):
        yield slice(start, start + ELEMENTS_AT_ONCE)
