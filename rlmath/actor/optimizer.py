"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmath.actor.fusions import accumulate_into_main_grads
from rlmath.config.optimizer import OptimizerConfig


def wrap_chunks(
    chunks: Sequence[Any],
    distributed_optimizer: bool,
    overlap: bool,
    overlap_param_gather: bool = False,
) -> list[Any]:
    """Megatron's DDP around each chunk of this rank's stage (see :func:`wrap_data_parallel`)."""
    wrapped = [
        wrap_data_parallel(chunk, distributed_optimizer, overlap, overlap_param_gather)
        for chunk in chunks
    ]
    if len(wrapped) > 1:
        # The schedule reads the first chunk's function.
        chunks[0].config.no_sync_func = [one.no_sync for one in wrapped]
    return wrapped


def wrap_data_parallel(
    model: Any, distributed_optimizer: bool, overlap: bool, overlap_param_gather: bool = False
) -> Any:
    """Megatron's DDP around a chunk. Gradients are float32 and summed, not averaged.

    Args:
        overlap: Sum a bucket once all its gradients are computed, in the backward pass of a
            minibatch's last micro-batch.
        overlap_param_gather: Leave the gather of updated parameters to
            :class:`rlmath.actor.parameter_gather.ParameterGather`; forward passes wait for it.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    wrapped = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap_param_gather,
            # Modules wait for their own bucket and do not start others.
            align_param_gather=overlap_param_gather,
        ),
        module=model,
    )
    if overlap:
        for parameter in model.parameters():
            # Megatron's hook needs a gradient from autograd; the head (head.py) returns none.
            parameter.wants_gradient = True
    accumulate_into_main_grads(model)

    def finalize(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        # Megatron would divide by a token count here, but the loss is already divided.
        finalize_model_grads(chunks, None, **kwargs)

    model.config.finalize_model_grads_func = finalize
    model.config.no_sync_func = wrapped.no_sync
    return wrapped


def build_optimizer(
    chunks: Sequence[Any], settings: OptimizerConfig, dtype: torch.dtype, *, distributed: bool
) -> Any:
    """Megatron's Adam over the parameters of wrapped chunks, weight decay on matrices only.
    ``distributed``: data-parallel ranks share the optimizer state."""
    from megatron.core import optimizer as megatron
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer import get_standard_config_overrides as overrides

    config = megatron.OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(
        config, list(chunks), config_overrides=overrides(config), use_gloo_process_groups=False
    )
    # If only adapters of experts are trained, Megatron has an empty part for dense parameters on
    # all ranks, which its chain cannot save.
    parts = optimizer.chained_optimizers
    if real := [one for one in parts if not getattr(one, "is_stub_optimizer", False)]:
        optimizer.chained_optimizers = real
    for chunk in chunks:
        chunk.module.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(optimizer: Any, settings: OptimizerConfig) -> Any:
    """Megatron's learning-rate schedule; ``step(1)`` after each optimizer step.

    ``decay_steps`` of the settings is null only for a constant schedule.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warmup = settings.warmup_of(settings.decay_steps or 0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(settings.decay_steps or 1, warmup + 1),
        lr_decay_style=settings.schedule.value,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
