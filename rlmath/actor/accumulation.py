"""Gradients of one minibatch from several runs of Megatron's schedule.

The schedule ends each run by summing the gradients over ranks. Between runs they stay in each
rank's buffers; the sum over ranks comes once, after the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def keeping_own_gradients(models: Sequence[Any]) -> Iterator[None]:
    """Runs of the schedule in this block add to this rank's gradients, and sum nothing over ranks.

    Args:
        models: The stage's chunks in Megatron's data-parallel wrapper.
    """
    configs = [one.module.config for one in models]
    before = [(one.finalize_model_grads_func, one.no_sync_func) for one in configs]
    with contextlib.ExitStack() as stack:
        for one in models:
            stack.enter_context(one.no_sync())
        for config in configs:
            # The schedule's own would let the last micro-batch of a run begin the sum over ranks.
            config.finalize_model_grads_func = config.no_sync_func = None
        try:
            yield
        finally:
            for config, (finalize, no_sync) in zip(configs, before, strict=True):
                config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync


def sum_over_ranks(models: Sequence[Any], divisor: float) -> None:
    """What the schedule does after its last micro-batch, then divide the gradients. Collective.

    Args:
        models: See :func:`keeping_own_gradients`.
        divisor: See ``aggregation.denominator``; below 1, of a minibatch without tokens, it is 1.
    """
    models[0].module.config.finalize_model_grads_func(list(models), None)
    for one in models:
        one.scale_gradients(1.0 / max(divisor, 1.0))


@contextlib.contextmanager
def setting_gradients_aside(models: Sequence[Any]) -> Iterator[None]:
    """This block may overwrite the gradients; after it they are as before it. Takes a copy of
    them in host memory."""
    kept = [(one, one.detach().to("cpu", copy=True)) for one in _buffers(models)]
    try:
        yield
    finally:
        for buffer, copy in kept:
            buffer.copy_(copy)


def _buffers(models: Sequence[Any]) -> list[Tensor]:
    return [
        buffer.grad_data for one in models for buffer in one.buffers + one.expert_parallel_buffers
    ]
