"""Observation of an update on a rank: its gradients, its change of the weights, and its pull on
each token. ``rlmath replay`` uses it to compare two updates of one batch.

The pull of a token is minus the derivative of the minibatch's loss with respect to the token's
log-prob: above 0, the update makes the token likelier. It includes the policy term and the KL term,
but not the entropy term, which is not a function of this log-prob alone.

Gradients and weights are compared where they are, like Megatron's gradient norm: each rank counts
its own values without copies of tensor ranks, shared embeddings and, with a distributed optimizer,
the shards of others; then they are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.schedule import OnLogProbs
from rlmath.batching.shards import Share

if TYPE_CHECKING:
    from rlmath.actor.worker import ActorWorker

T = TypeVar("T")
# This rank's part of a gradient or of the weights: for each part of the optimizer, its tensors.
Vector = list[list[Tensor]]


@dataclass(frozen=True)
class Products:
    """Products of two vectors that are sharded over ranks."""

    own: float  # Squared norm of one.
    earlier: float  # Squared norm of the other.
    both: float  # Their dot product.

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle; ``None`` if one of them is 0."""
        norms = self.own**0.5 * self.earlier**0.5
        return self.both / norms if norms else None


@dataclass(frozen=True)
class Pulls:
    """Pulls on the tokens of a rank's share of a minibatch."""

    places: Tensor  # [N] int64, indices of the sequences in the step.
    response_lengths: Tensor  # [N] int64, in tokens.
    values: Tensor  # [R] float32.


@dataclass(frozen=True)
class ObservedUpdate:
    # For each minibatch, the gradient before clipping and that of the earlier update.
    gradients: tuple[Products, ...]
    change: Products | None  # The same for the change of the weights; None without a minibatch.
    pulls: tuple[Pulls, ...]  # Pulls of each minibatch, on ranks that report; else empty.


class UpdateObserver:
    """Observes one update of a rank's policy.

    Keeps a copy of each minibatch's gradient in host memory for the update that will be compared
    with this one, unless this update is itself compared. ``earlier``: observer of an update to
    compare this one with; ``None``: none.
    """

    def __init__(self, earlier: UpdateObserver | None = None) -> None:
        self._earlier = earlier
        if earlier is not None:
            earlier._earlier = None
        self._gradients: list[Vector] = []
        self._products: list[Products] = []
        self._before: Vector = []
        self._change: Vector = []
        self._pulls: list[Pulls] = []

    def watching(self, objective: OnLogProbs[T], share: Share) -> OnLogProbs[T]:
        """Wrap the objective of a minibatch so that it also records the pull on each token."""
        values = torch.zeros(share.batch.loss_mask.numel())
        self._pulls.append(Pulls(share.places, share.batch.response_lengths, values))

        def observe(one: PackedMicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, T]:
            loss, kept = objective(one, log_probs, entropy)
            (slopes,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
            values[one.response_rows.cpu()] = -slopes.detach().float().cpu()
            return loss, kept

        return observe

    def record_gradient(self, optimizer: Any) -> None:
        """Record a minibatch's summed gradient, before clipping and applying it. Collective."""
        if not self._before:
            self._before = [[_copy(one) for one in part] for part in _own(optimizer)]
        own = gradient_of(optimizer)
        if self._earlier is None:
            self._products.append(products_of(optimizer, own, None))
            self._gradients.append(own)
            return
        left = self._earlier._gradients
        self._products.append(products_of(optimizer, own, left.pop(0) if left else None))

    def finish(self, optimizer: Any, reports: bool = True) -> ObservedUpdate:
        """Compare with the earlier update. Collective. ``reports``: whether this rank's pulls are
        used."""
        earlier, self._earlier = self._earlier, None
        change = None
        if self._before:
            parts = zip(_own(optimizer), self._before, strict=True)
            self._change = [
                [_copy(now) - before for now, before in zip(part, old, strict=True)]
                for part, old in parts
            ]
            self._before = []
            before = None if earlier is None else earlier._change or None
            change = products_of(optimizer, self._change, before)
        pulls = tuple(self._pulls) if reports else ()
        return ObservedUpdate(tuple(self._products), change, pulls)


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers, one per kind of parameters, such as experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _own(optimizer: Any) -> Iterator[list[Any]]:
    """For each optimizer the main parameters whose gradients this rank counts in the norm."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import param_is_not_shared

    for part in _parts(optimizer):
        group = getattr(part, "tp_group", None)
        yield [
            one
            for one in part.get_parameters()
            if param_is_not_shared(one)
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(one, group)
        ]


def _gradient(parameter: Tensor) -> Tensor:
    found = parameter.grad
    return torch.zeros(parameter.shape) if found is None else _copy(found)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def gradient_of(optimizer: Any) -> Vector:
    """A copy of this rank's part of the gradient, in host memory."""
    return [[_gradient(one) for one in part] for part in _own(optimizer)]


def products_of(optimizer: Any, own: Vector, earlier: Vector | None) -> Products:
    """Products in float64, over all ranks. Collective. ``earlier``: the earlier update;
    ``None``: none, and its products are 0."""
    total = torch.zeros(3, dtype=torch.float64)
    for place, part in enumerate(_parts(optimizer)):
        sums = torch.zeros(3, dtype=torch.float64)
        others = own[place] if earlier is None else earlier[place]
        for one, other in zip(own[place], others, strict=True):
            a, b = one.double().flatten(), other.double().flatten()
            sums += torch.stack([a @ a, b @ b, a @ b])
        device = next((p.device for p in part.get_parameters()), torch.device("cpu"))
        sums = sums.to(device)
        dist.all_reduce(sums, group=part.get_grad_stats_parallel_group())
        total += sums.cpu()
    if earlier is None:
        return Products(float(total[0]), 0.0, 0.0)
    return Products(*total.tolist())


def watch_update(worker: ActorWorker) -> None:
    """Observe a rank's next updates, and compare them with those observed before."""
    worker.actor.observer = UpdateObserver(worker.actor.observer)


def watched_update(worker: ActorWorker) -> ObservedUpdate:
    """A rank's observation since :func:`watch_update`. Collective."""
    actor = worker.actor
    assert actor.observer is not None
    return actor.observer.finish(actor.optimizer, actor.reports)
