"""Each micro-batch's share of the gradient, at a few elements of each layer's matrices.

A hook reads the gradient from autograd before Megatron adds it to its buffer, and before the
sum over ranks may begin. So a micro-batch that adds nothing to a layer shows, on each rank and
stage; and the buffers have to be the sum of what micro-batches and data-parallel ranks gave.
Without the sum over ranks every rank trains on its sequences alone: with the distributed
optimizer no copy of the weights differs then, as each rank's part of them is gathered by all.

Some matrices may rightly get nothing on a rank: an expert that no token goes to, and a part of an
embedding whose tokens do not occur. The experts of a layer, and the parts of an embedding, are
judged together, over all ranks that have some.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.head import head_of
from rlmath.actor.step_probe import GRADIENT_SUM, NO_SHARE, OTHER_GRADIENT, StepFinding

# Looked at in each pass, other ones in the next: matrices, and experts.
MAX_TENSORS, ELEMENTS = 64, 8
# Norms and biases in each pass: whether a micro-batch gives them anything, and no sums.
MAX_VECTORS = 4
# Rows of an embedding and an output layer, in a column of each pass. Frequent tokens are the first.
VOCABULARY_ROWS = 4096
# Relative tolerance of the sum of sizes: ranks add up float32 in another order.
TOLERANCE = 1e-4
# Relative tolerance of a micro-batch's gradient that is computed again in other parts, which round
# differently. A model that dozens of faulty steps had driven far off reached 0.03 in float32.
AGAIN_TOLERANCE = {torch.float32: 0.1, torch.bfloat16: 0.5}
# And of the largest of the minibatch, as its sequences' gradients may cancel.
CANCELED = 0.1
# Share of a minibatch's largest size below which a size may vanish beside it in float32.
LEAST_SIGNAL = 1e-3


@dataclass(frozen=True)
class Groups:
    """Ranks that share gradients; ``None``: this rank alone.

    Attributes:
        data: Sum gradients.
        experts: Sum those of experts that are spread over ranks.
        stages: The first and the last stage add up a tied embedding's.
        tensor: Have parts of an embedding, and with sequence parallelism sum gradients of routers.
        layer: Have experts of one layer.
    """

    data: Any = None
    experts: Any = None
    stages: Any = None
    tensor: Any = None
    layer: Any = None

    @classmethod
    def of_megatron(cls) -> Groups:
        """The groups of this process, whose parallel state is initialized."""
        from megatron.core import parallel_state as state

        found = (
            state.get_data_parallel_group(with_context_parallel=True),
            state.get_expert_data_parallel_group(),
            state.get_embedding_group(check_initialized=False),
            state.get_tensor_model_parallel_group(),
            state.get_expert_tensor_and_model_parallel_group(),
        )
        return cls(*(None if one is None or one.size() == 1 else one for one in found))


@dataclass(frozen=True)
class _Watched:
    """Elements of a matrix.

    Attributes:
        kind: ``matrix``, ``experts``, ``router``, ``vector`` (a norm or bias), ``embedding``, or
            ``head``: what the output layer adds to its weight, which is the embedding's where they
            are tied.
        elements: How many are looked at.
        places: ``[elements]`` int64, in the whole matrix; ``None``: the first rows, in a column
            that changes, as of a vocabulary and a router.
        shared: Another stage may have the same.
    """

    name: str
    parameter: Any
    kind: str
    elements: int
    places: Tensor | None = None
    shared: bool = False


@dataclass(frozen=True)
class _Unit:
    """Matrices that are judged together.

    Attributes:
        name: Name for messages.
        kind: See :class:`_Watched`.
        numbers: Numbers of the matrices.
    """

    name: str
    kind: str
    numbers: tuple[int, ...]


class GradientShares:
    """Watches the matrices of a rank. Collective over the groups. ``models``: chunks in Megatron's
    data-parallel wrapper. ``groups``: ranks that sum their gradients."""

    def __init__(self, models: Sequence[Any], groups: Groups) -> None:
        self._groups, self._passes = groups, 0
        self._device = next(iter(models[0].parameters())).device
        self._watched = list(_watchable_matrices(models))
        self._units = list(_units(self._watched))
        # The units watched in this pass: what each micro-batch gave, the buffer's last values, and
        # in the end the sum of what was given.
        self._chosen: list[_Unit] = []
        self._given: dict[int, list[Tensor]] = {}
        self._held: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}
        # Largest size of each share of an embedding, over all of its rows.
        self._largest: dict[int, list[Tensor]] = {}
        heads = {id(one.parameter): n for n, one in enumerate(self._watched) if one.kind == "head"}
        for number, one in enumerate(self._watched):
            if one.kind == "head":
                one.parameter.after_head = functools.partial(self._receive_from_head, number)
                continue
            tied = heads.get(id(one.parameter))
            one.parameter.register_post_accumulate_grad_hook(
                functools.partial(self._receive, number, tied)
            )

    @property
    def layers(self) -> list[tuple[str, Any]]:
        """Names and parameters of the layers' matrices, but experts."""
        return [(one.name, one.parameter) for one in self._watched if one.kind == "matrix"]

    def begin(self) -> None:
        """A pass begins; the buffers are cleared."""
        self._chosen = []
        for kinds in (("matrix",), ("experts",), ("router",), ("embedding", "head"), ("vector",)):
            units = [one for one in self._units if one.kind in kinds]
            tensors = sum(len(one.numbers) for one in units)
            most = MAX_VECTORS if kinds == ("vector",) else MAX_TENSORS
            stride = max(1, min(len(units), -(-tensors // most)))
            self._chosen += units[self._passes % stride :: stride]
        self._passes += 1
        numbers = [number for unit in self._chosen for number in unit.numbers]
        self._given = {number: [] for number in numbers}
        self._largest, self._held, self._shares = {}, {}, {}
        # Content of the buffer before this pass, equal in all buffers.
        self._held = {number: self._buffer(number) for number in numbers[:1]}

    def _elements(self, number: int, values: Tensor) -> Tensor:
        one = self._watched[number]
        # Not a view, which would keep all of the gradient.
        if one.places is not None:
            # A single operation: this is called for each matrix and micro-batch.
            return torch.take(values, one.places)
        return values[: one.elements, self._column(values)].to(torch.float32, copy=True)

    def _column(self, values: Tensor) -> int:
        return 7 * self._passes % values.size(1)

    def _receive(self, number: int, tied: int | None, parameter: Tensor) -> None:
        if number not in self._given:
            return
        if getattr(parameter, "grad_added_to_main_grad", False):
            # Transformer Engine has added it in its product.
            share = self._growth(number)
        else:
            assert parameter.grad is not None
            share = self._elements(number, parameter.grad)
        if self._watched[number].kind == "embedding":
            column = parameter.grad[:, self._column(parameter)]
            self._largest.setdefault(number, []).append(column.abs().amax().double())
            if tied is not None:
                self._held[tied] = share + self._held.get(tied, 0.0)
        self._given[number].append(share)

    def _receive_from_head(self, number: int) -> None:
        if number in self._given:
            self._given[number].append(self._growth(number))

    def _growth(self, number: int) -> Tensor:
        """Growth of the buffer since the last call; a pass begins with 0."""
        now = self._buffer(number)
        share = now - self._held[number] if number in self._held else now
        self._held[number] = now
        return share

    def _buffer(self, number: int) -> Tensor:
        return self._elements(number, self._watched[number].parameter.main_grad.detach())

    @torch.no_grad()
    def sums(self) -> StepFinding:
        """Whether the buffers, which are reduced, have the sum of all that was given.

        With the distributed optimizer each element is reduced on one rank.
        """
        groups = self._groups
        buffers: dict[int, list[int]] = {}
        for number in self._given:
            if self._watched[number].kind == "vector":
                continue
            buffers.setdefault(id(self._watched[number].parameter), []).append(number)
        own: list[list[list[int]]] = [[], [], [], []]
        for numbers in buffers.values():
            one = self._watched[numbers[0]]
            spread = not getattr(one.parameter, "allreduce", True)
            shared = one.shared and groups.stages is not None
            alike = 3 * getattr(one.parameter, "sequence_parallel", False)
            own[1 if spread else 2 if shared else alike] += [numbers]
        found = [
            self._wrong_sum(own[0], groups.data),
            self._wrong_sum(own[1], groups.experts),
            self._wrong_sum(own[2], groups.data, groups.stages),
            self._wrong_sum(own[3], groups.data, groups.tensor),
        ]
        return next((one for one in found if one.kind), StepFinding())

    def _wrong_sum(
        self, buffers: Sequence[Sequence[int]], group: Any, more: Any = None
    ) -> StepFinding:
        """First wrong sum among buffers that ranks of one or two groups add up."""
        if not buffers:
            return StepFinding()
        now = torch.cat([self._buffer(numbers[0]).double() for numbers in buffers])
        totals = [torch.cat([self._of(number) for number in numbers]) for numbers in buffers]
        both = [torch.cat([one.sum(0) for one in totals])]
        both += [torch.cat([one.abs().sum(0) for one in totals])]
        given = torch.stack(both).to(now.device)
        for ranks in (group, more):
            if ranks is not None:
                dist.all_reduce(given, group=ranks)
        wanted, sizes = given
        off = (now - wanted).abs()
        if group is not None:
            dist.all_reduce(off, op=dist.ReduceOp.MIN, group=group)
        # NaN is reported elsewhere, and is no sum.
        wrong = off > TOLERANCE * sizes + 1e-30
        if not bool(wrong.any()):
            return StepFinding()
        place = int((off * wrong).argmax())
        owners = [one for one, *_ in buffers for _ in range(self._watched[one].elements)]
        name = self._watched[owners[place]].name
        return StepFinding(GRADIENT_SUM, float(now[place]), float(wanted[place]), name)

    def _of(self, number: int) -> Tensor:
        """``[micro-batches, elements]`` float64."""
        if number not in self._shares:
            given = _stack(self._given[number], self._watched[number].elements)
            self._shares[number] = given.to(self._device)
        return self._shares[number]

    @torch.no_grad()
    def gradient_sizes(self, count: int) -> Tensor:
        """``[units, count]`` float64 on the device, the largest size of what each micro-batch
        gave. Collective. ``count``: micro-batches."""
        found = []
        for unit in self._chosen:
            row = torch.zeros(count, dtype=torch.float64, device=self._device)
            for number in unit.numbers:
                own = self._of(number).abs().amax(1)
                if number in self._largest:
                    own = torch.stack(self._largest[number])
                own = own[:count].to(self._device)
                row[: len(own)] = torch.maximum(row[: len(own)], own)
            found.append(row)
        if not found:
            return torch.zeros(0, count, dtype=torch.float64, device=self._device)
        rows = torch.stack(found)
        for kinds, group in (
            (("embedding", "router", "vector"), self._groups.tensor),
            (("experts",), self._groups.layer),
        ):
            chosen = [place for place, unit in enumerate(self._chosen) if unit.kind in kinds]
            if group is not None and chosen:
                together = rows[chosen]
                dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
                rows[chosen] = together
        return rows

    def repeat(self) -> None:
        """The next pass looks at the same elements."""
        self._passes -= 1

    def totals(self) -> list[Tensor]:
        """``[elements]`` float64 that the pass gave to each matrix that is watched."""
        return [self._of(number).sum(0) for number in self._given]

    @torch.no_grad()
    def differs_from(self, again: Sequence[Tensor], micro_batch: int) -> StepFinding:
        """Whether a micro-batch gave something else when it was computed alone, in two parts.
        ``again``: from :meth:`totals` of that pass. ``micro_batch``: its index in the last pass,
        which watched the same elements."""
        for (number, shares), other in zip(self._given.items(), again, strict=True):
            own, one = self._of(number), self._watched[number]
            # A missing share is another finding, and keys' biases nearly cancel.
            if micro_batch >= len(shares) or one.kind == "vector":
                continue
            size = torch.maximum(own[micro_batch].norm(), CANCELED * own.norm(dim=1).max())
            off = (own[micro_batch] - other.to(own.device)).norm()
            # NaN is reported elsewhere.
            if off > AGAIN_TOLERANCE.get(one.parameter.dtype, 0.5) * size:
                place = int((own[micro_batch] - other.to(own.device)).abs().argmax())
                found, wanted = float(own[micro_batch][place]), float(other[place])
                return StepFinding(
                    OTHER_GRADIENT, found, wanted, f"micro-batch {micro_batch}, {one.name}"
                )
        return StepFinding()

    def nothing_given(self, given: Tensor, signals: Tensor) -> StepFinding:
        """Whether a micro-batch whose log-probs have a gradient gives a matrix nothing. ``given``:
        see :meth:`gradient_sizes`. ``signals``: ``[count]``, the size of each micro-batch's
        gradient by its log-probs."""
        judged = signals > LEAST_SIGNAL * signals.max() if len(signals) else signals > 0
        missing = ((given == 0) & judged.to(given.device)).nonzero()
        if not len(missing):
            return StepFinding()
        row, micro_batch = missing[0].tolist()
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        place = f"micro-batch {micro_batch}, {self._chosen[row].name}{count}"
        return StepFinding(NO_SHARE, 0.0, float(given.max()), place)


def _watchable_matrices(models: Sequence[Any]) -> Iterator[_Watched]:
    """Watch the second factor of an adapter: the first has no gradient at the start."""
    for model in models:
        layers = {
            f"{name}.": f"layer {module.layer_number - 1}: "
            for name, module in model.named_modules()
            if hasattr(module, "layer_number") and name.rpartition(".")[2].isdecimal()
        }
        parts = list(model.modules())
        shared = any(getattr(one, "share_embeddings_and_output_weights", False) for one in parts)
        heads = [one for one in map(head_of, parts) if one is not None]
        head = next((one.weight for one in heads if one.weight.requires_grad), None)
        for name, parameter in model.named_parameters():
            if (
                not parameter.requires_grad
                or name.endswith(".a")
                # Megatron adds these up over tensor ranks; routers alone are summed like that here.
                or (
                    parameter.dim() > 1
                    and getattr(parameter, "sequence_parallel", False)
                    and "router" not in name
                )
            ):
                continue
            own = next((one for one in layers if name.startswith(one)), None)
            title = name if own is None else f"{layers[own]}{name.removeprefix(own)}"
            if parameter.dim() < 2:
                yield _Watched(title, parameter, "vector", *_spread(parameter))
                continue
            # The last stage's copy of the embedding, where logits are not taken piece by piece:
            # with the first stage's it has the sum of both.
            copied = shared and parameter is not head and "output_layer" in name
            if parameter is not head and "embedding" not in name and not copied:
                if "router" in name:
                    # All rows: experts without a token get nothing.
                    yield _Watched(title, parameter, "router", len(parameter))
                    continue
                kind = "experts" if ".experts." in name else "matrix"
                elements, places = _spread(parameter)
                if elements:
                    yield _Watched(title, parameter, kind, elements, places)
                continue
            rows = min(VOCABULARY_ROWS, len(parameter))
            if copied or "embedding" in name:
                yield _Watched(title, parameter, "embedding", rows, shared=shared)
            if parameter is head:
                yield _Watched(f"{title} (output layer)", parameter, "head", rows, shared=shared)


def _units(watched: Sequence[_Watched]) -> Iterator[_Unit]:
    """The experts of each layer together, of each of their matrices; all others alone."""
    experts: dict[str, list[int]] = {}
    for number, one in enumerate(watched):
        if one.kind == "experts":
            # Megatron has modules of experts, or one module with a weight for each.
            name = re.sub(r"local_experts\.\d+\.|\d+$", "", one.name)
            experts.setdefault(name, []).append(number)
        else:
            yield _Unit(one.name, one.kind, (number,))
    for name, numbers in experts.items():
        yield _Unit(f"{name} of all experts", "experts", tuple(numbers))


def _spread(parameter: Any) -> tuple[int, Tensor]:
    """How many elements, and their places, which go through different columns; of an adapter, in
    the rows that have a gradient."""
    rows, columns = getattr(parameter, "used_rows", None), parameter.shape[-1]
    elements = parameter.numel() if rows is None else columns * len(rows)
    count = min(ELEMENTS, elements)
    stride = max(1, (elements - 1) // max(1, count - 1))
    stride = max(1, stride - (stride % columns == 0))
    places = stride * torch.arange(count, device=parameter.device)
    return count, places if rows is None else columns * rows[places // columns] + places % columns


def _stack(shares: Sequence[Tensor], elements: int) -> Tensor:
    """``[micro-batches, elements]`` float64; no row: the hook was never called."""
    if not shares:
        return torch.zeros(1, elements, dtype=torch.float64)
    return torch.stack(list(shares)).double()
