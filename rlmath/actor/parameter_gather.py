"""Updated parameters that are gathered in the next forward pass (``actor.overlap_param_gather``).

After an optimizer step each data-parallel rank has new values for its share of the parameters;
the others come from the other ranks, a bucket at a time. Megatron's DDP begins a bucket's gather in
the forward pass, behind a module that waits for the one before it. Here all are begun at once, at
the end of the optimizer step and in the order in which a forward pass takes them. So a later
pipeline stage has its weights before its first micro-batch arrives; and to complete them is to wait
for what this rank has begun, which any reader can do alone, when it comes to it.

Modules wait in Megatron's forward pre-hooks. Everyone else reads through
:class:`rlmath.actor.offload.DeviceState`, which calls :meth:`ParameterGather.finish`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class ParameterGather:
    """The gathers of a rank's stage.

    Args:
        models: Its chunks in Megatron's data-parallel wrapper, built with ``overlap_param_gather``
            and ``align_param_gather``; empty: the optimizer gathers, and there is nothing to do.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._groups = [group for one in models for group in _in_order_of_use(one)]

    def begin(self) -> None:
        """Begin to gather all parameters, which the optimizer has changed. Collective."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Wait for what is under way, on this rank alone; after it, parameters may be read."""
        for group in self._groups:
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def before_pass(self) -> None:
        """Have a forward pass wait for what is under way, and gather nothing else.

        Megatron takes parameters for old once their gradients are summed, also if no optimizer step
        followed (a discarded minibatch, the gradient of a single sequence).
        """
        for group in self._groups:
            group.param_gather_dispatched = True


def _in_order_of_use(model: Any) -> Iterator[Any]:
    """A chunk's groups of buckets, of dense parameters and of experts, as a forward pass meets
    them."""
    places = {parameter: place for place, parameter in enumerate(model.module.parameters())}
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    yield from sorted(groups, key=lambda group: min(places[one] for one in group.params))
