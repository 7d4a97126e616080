"""What each micro-batch adds to the gradient, at a few elements of each layer's matrices.

A hook reads what autograd gives a parameter before Megatron adds it to its buffer, and before the
sum over ranks may begin. So a micro-batch that adds nothing to a layer shows, on each rank and
stage; and the buffers have to be the sum of what micro-batches and data-parallel ranks gave.
Without the sum over ranks every rank trains on its own sequences alone: with the distributed
optimizer no copy of the weights differs then, as each rank's part of them is gathered by all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.step_probe import GRADIENT_SUM, NO_SHARE, OTHER_GRADIENT, StepFinding

# Looked at in each pass, other ones in the next; one matrix of each of 64 layers.
MAX_TENSORS, ELEMENTS = 64, 8
# Of the sum of sizes: ranks add up float32 in another order.
TOLERANCE = 1e-4
# Of a micro-batch's gradient that is computed again in other parts, as those round differently. In
# float32 0.03 was seen, of a model that dozens of faulty steps had driven far off.
AGAIN_TOLERANCE = {torch.float32: 0.1, torch.bfloat16: 0.5}
# And of the largest of the minibatch, as its sequences' gradients may cancel.
CANCELED = 0.1
# Of the largest of a minibatch: what is smaller may vanish beside it in float32.
LEAST_SIGNAL = 1e-3


class GradientShares:
    """Watches the matrices of a rank. Collective over the group.

    Args:
        models: Chunks in Megatron's data-parallel wrapper.
        group: Of the ranks whose gradients are summed; ``None``: there is one.

    Attributes:
        watched: Names and parameters.
    """

    def __init__(self, models: Sequence[Any], group: Any) -> None:
        self._group, self._passes = group, 0
        self._device = next(iter(models[0].parameters())).device
        self.watched = list(_matrices(models))
        self._places = [_places(one) for _, one in self.watched]
        # Of those looked at in this pass: what each micro-batch gave, and what the buffer had.
        self._given: dict[int, list[Tensor]] = {}
        self._held: dict[int, Tensor] = {}
        for number, (_, one) in enumerate(self.watched):
            one.register_post_accumulate_grad_hook(functools.partial(self._receive, number))

    def begin(self) -> None:
        """A pass begins; the buffers are cleared."""
        stride = max(1, -(-len(self.watched) // MAX_TENSORS))
        chosen = range(self._passes % stride, len(self.watched), stride)
        self._passes += 1
        self._given = {number: [] for number in chosen}
        self._held = {number: self._buffer(number) for number in chosen}

    @torch.no_grad()
    def _receive(self, number: int, parameter: Tensor) -> None:
        if number not in self._given:
            return
        if getattr(parameter, "grad_added_to_main_grad", False):
            # Transformer Engine has added it in its product.
            now = self._buffer(number)
            share, self._held[number] = now - self._held[number], now
        else:
            assert parameter.grad is not None
            share = parameter.grad[self._places[number]].float()
        self._given[number].append(share)

    def _buffer(self, number: int) -> Tensor:
        buffer: Tensor = self.watched[number][1].main_grad
        return buffer.detach()[self._places[number]].float()

    @torch.no_grad()
    def sums(self) -> StepFinding:
        """Whether the buffers, which are reduced, have the sum of all that was given.

        With the distributed optimizer each element is reduced on one rank.
        """
        if not self._given:
            return StepFinding()
        now = torch.cat([self._buffer(number).double() for number in self._given])
        given = [_stacked(of, len(self._places[n][0])) for n, of in self._given.items()]
        given = [one.to(now.device) for one in given]
        wanted = torch.cat([one.sum(0) for one in given])
        sizes = torch.cat([one.abs().sum(0) for one in given])
        off = (now - wanted).abs()
        if self._group is not None:
            for one in (wanted, sizes):
                dist.all_reduce(one, group=self._group)
            off = (now - wanted).abs()
            dist.all_reduce(off, op=dist.ReduceOp.MIN, group=self._group)
        # NaN is reported elsewhere, and is no sum.
        wrong = off > TOLERANCE * sizes + 1e-30
        if not bool(wrong.any()):
            return StepFinding()
        place = int((off * wrong).argmax())
        owners = [n for n in self._given for _ in self._places[n][0]]
        name = self.watched[owners[place]][0]
        return StepFinding(GRADIENT_SUM, float(now[place]), float(wanted[place]), name)

    @torch.no_grad()
    def given(self, count: int) -> Tensor:
        """``[tensors, count]`` float64 on the device, the largest size of what each micro-batch
        gave.

        Args:
            count: Micro-batches.
        """
        rows = []
        for number, shares in self._given.items():
            row = _stacked(shares, len(self._places[number][0])).abs().amax(1)
            rows.append(torch.cat([row, row.new_zeros(max(0, count - len(row)))])[:count])
        if not rows:
            return torch.zeros(0, count, dtype=torch.float64, device=self._device)
        return torch.stack([one.to(self._device) for one in rows])

    def repeat(self) -> None:
        """The next pass looks at the same elements."""
        self._passes -= 1

    def totals(self) -> list[Tensor]:
        """Of each matrix that is looked at, ``[elements]`` float64 of what the pass gave."""
        return [_stacked(of, len(self._places[n][0])).sum(0) for n, of in self._given.items()]

    @torch.no_grad()
    def differs_from(self, again: Sequence[Tensor], micro_batch: int) -> StepFinding:
        """Whether a micro-batch gave something else when it was computed alone, in two parts.

        Args:
            again: From :meth:`totals` of that pass.
            micro_batch: Of the last pass, which looked at the same elements.
        """
        for (number, shares), other in zip(self._given.items(), again, strict=True):
            if micro_batch >= len(shares):
                continue  # It gave nothing, which has another name.
            own = _stacked(shares, len(self._places[number][0]))
            name, parameter = self.watched[number]
            size = torch.maximum(own[micro_batch].norm(), CANCELED * own.norm(dim=1).max())
            off = (own[micro_batch] - other.to(own.device)).norm()
            # NaN is reported elsewhere.
            if off > AGAIN_TOLERANCE.get(parameter.dtype, 0.5) * size:
                place = int((own[micro_batch] - other.to(own.device)).abs().argmax())
                found, wanted = float(own[micro_batch][place]), float(other[place])
                return StepFinding(
                    OTHER_GRADIENT, found, wanted, f"micro-batch {micro_batch}, {name}"
                )
        return StepFinding()

    def nothing_given(self, given: Tensor, signals: Tensor) -> StepFinding:
        """Whether a micro-batch whose log-probs have a gradient gives a matrix nothing.

        Args:
            given: See :meth:`given`.
            signals: ``[count]``, the size of each micro-batch's gradient by its log-probs.
        """
        judged = signals > LEAST_SIGNAL * signals.max() if len(signals) else signals > 0
        missing = ((given == 0) & judged.to(given.device)).nonzero()
        if not len(missing):
            return StepFinding()
        row, micro_batch = missing[0].tolist()
        name = self.watched[list(self._given)[row]][0]
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        place = f"micro-batch {micro_batch}, {name}{count}"
        return StepFinding(NO_SHARE, 0.0, float(given.max()), place)


# Experts may get no token; of the others Megatron adds up some over other ranks as well.
_NOT_WATCHED = (".experts.", "embedding", "output_layer", "router")


def _matrices(models: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Those that no other group of ranks sums: neither experts, routers nor shared embeddings, nor
    what tensor ranks have alike. Of an adapter the second factor: the first has no gradient at the
    start."""
    for model in models:
        layers = {
            f"{name}.": f"layer {module.layer_number - 1}: "
            for name, module in model.named_modules()
            if hasattr(module, "layer_number") and name.rpartition(".")[2].isdecimal()
        }
        for name, parameter in model.named_parameters():
            if (
                parameter.requires_grad
                and parameter.dim() > 1
                and getattr(parameter, "allreduce", True)
                and not getattr(parameter, "sequence_parallel", False)
                and not name.endswith(".a")
                and not any(part in name for part in _NOT_WATCHED)
            ):
                own = [one for one in layers if name.startswith(one)]
                yield (f"{layers[own[0]]}{name.removeprefix(own[0])}" if own else name), parameter


def _places(parameter: Tensor) -> tuple[Tensor, ...]:
    """Indices of a few elements, in different rows and columns."""
    count = min(ELEMENTS, parameter.numel())
    steps = torch.arange(count)
    flat = steps * (parameter.numel() // count) + steps * 37 % parameter.shape[-1]
    places = torch.unravel_index(flat % parameter.numel(), parameter.shape)
    return tuple(one.to(parameter.device) for one in places)


def _stacked(shares: Sequence[Tensor], elements: int) -> Tensor:
    """``[micro-batches, elements]`` float64; no row: the hook was never called."""
    if not shares:
        return torch.zeros(1, elements, dtype=torch.float64)
    return torch.stack(list(shares)).double()
