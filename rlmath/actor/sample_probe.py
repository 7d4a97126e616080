"""The gradient of single sequences, beside that of the minibatch that they are in.

A minibatch's loss is a sum over its sequences, whose weights have the denominators of the whole
minibatch in them. So its gradient is the sum of its sequences' gradients, and a sequence's own is
that of the same loss with the weights of all others 0. It takes another forward and backward pass
of the minibatch, and host memory for one copy of the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlmath.actor.observer import Products, Vector, gradient_of, products_of
from rlmath.batching.shards import Share

if TYPE_CHECKING:
    from rlmath.actor.worker import ActorWorker


class SampleProbe:
    """Takes the gradients of some sequences in the next update. Collective.

    Args:
        minibatches: By place in the step, the minibatch of each sequence, from 0.
    """

    def __init__(self, minibatches: Mapping[int, int]) -> None:
        self._minibatches = dict(sorted(minibatches.items()))
        self._taken: dict[int, Vector] = {}
        self.found: dict[int, Products] = {}

    @property
    def places(self) -> tuple[int, ...]:
        """Of the sequences in the step."""
        return tuple(self._minibatches)

    def before(self, index: int, share: Share, backward: Callable[[Share], Any]) -> None:
        """Before a minibatch: the gradients of its sequences that are asked for.

        Args:
            index: Of the minibatch.
            share: This rank's part of it; the sequences may be another rank's.
            backward: Leaves the gradient of a share in the optimizer, which it returns.
        """
        for place, minibatch in self._minibatches.items():
            if minibatch == index:
                self._taken[place] = gradient_of(backward(_alone(share, place)))

    def see_gradient(self, optimizer: Any) -> None:
        """The minibatch's own gradient is summed, and not yet clipped nor applied."""
        whole = gradient_of(optimizer) if self._taken else []
        for place, own in self._taken.items():
            self.found[place] = products_of(optimizer, own, whole)
        self._taken = {}


def _alone(share: Share, place: int) -> Share:
    """A share in whose loss no other sequence counts."""
    lengths = share.batch.response_lengths
    own = torch.repeat_interleave(share.places == place, lengths)
    return dataclasses.replace(share, weights=torch.where(own, share.weights, 0.0))


def probe_samples(worker: ActorWorker, minibatches: Mapping[int, int]) -> None:
    """Take the gradients of single sequences in a rank's next update; see :class:`SampleProbe`."""
    worker.actor.probe = SampleProbe(minibatches)


def probed_samples(worker: ActorWorker) -> dict[int, Products]:
    """What :func:`probe_samples` asked for, by place in the step; alike on all ranks. ``own`` is of
    the sequence's gradient, ``earlier`` of its minibatch's."""
    probe, worker.actor.probe = worker.actor.probe, None
    assert probe is not None
    return probe.found
