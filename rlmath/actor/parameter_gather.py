"""Gather updated parameters during the next forward pass (``actor.overlap_param_gather``).

After an optimizer step each data-parallel rank has new values for its share of the parameters; the
others come from the other ranks, one bucket at a time. Megatron's DDP starts a bucket's gather in
the forward pass, after a module that waits for the previous one. Here all are started at once, at
the end of the optimizer step, in the order in which a forward pass uses them. A later pipeline
stage therefore has its weights before its first micro-batch arrives, and any reader can complete
them alone, by waiting for the gathers that this rank has started.

Modules wait in Megatron's forward pre-hooks. All other code reads through
:class:`rlmath.actor.offload.DeviceState`, which calls :meth:`ParameterGather.finish`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class ParameterGather:
    """The gathers of a rank's stage.

    Args:
        models: Its chunks in Megatron's data-parallel wrapper, built with ``overlap_param_gather``
            and ``align_param_gather``; empty: the optimizer gathers, so this is a no-op.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._groups = [group for one in models for group in _in_order_of_use(one)]

    def begin(self) -> None:
        """Start gathering all parameters after the optimizer has changed them. Collective."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Wait for running gathers, on this rank alone; afterwards parameters may be read."""
        for group in self._groups:
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def before_pass(self) -> None:
        """Let a forward pass wait for running gathers, and start no others.

        Megatron considers parameters outdated once their gradients are summed, even if no optimizer
        step followed (a discarded minibatch, the gradient of a single sequence).
        """
        for group in self._groups:
            group.param_gather_dispatched = True


def _in_order_of_use(model: Any) -> Iterator[Any]:
    """A chunk's bucket groups, of dense parameters and of experts, in the order of use in a forward
    pass."""
    places = {parameter: place for place, parameter in enumerate(model.module.parameters())}
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    yield from sorted(groups, key=lambda group: min(places[one] for one in group.params))
