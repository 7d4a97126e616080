"""Log-probs and entropies from hidden states, without materializing all logits.

Logits ``[t, v]`` of a micro-batch are the largest tensor of a step, and their gradient is another.
Here the output layer multiplies a chunk of the needed rows at a time: forward keeps log Z and the
entropy of each row, backward recomputes the chunk's logits, overwrites them with their gradient,
and accumulates the gradients of hidden states and weight. ``softmax_tables.py`` or
``softmax_triton.py`` computes the softmax; ``head_rows.py`` has the sizes of chunks.

The output layer stays Megatron's module with its weight (names, checkpoints, tied embeddings);
:func:`defer_logits` makes it return its input instead of multiplying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.actor import softmax_tables
from rlmath.actor.head_rows import rows_per_chunk, weight_rows_per_block
from rlmath.actor.logprobs import Distribution, VocabSlice


class HeadLinear(nn.Module):
    """The product of the output layer for a chunk of rows, and its softmax implementation.

    A module, so that hooks on a linear layer's output (``rounding_noise.py``) reach the logits.
    ``in_float32``: multiply in float32, whatever the type of hidden states and weight. ``triton``:
    compute the softmax in Triton kernels.
    """

    def __init__(self, in_float32: bool = False, triton: bool = False) -> None:
        super().__init__()
        self.in_float32 = in_float32
        self.softmax: Any = softmax_tables
        if triton:
            from rlmath.actor import softmax_triton

            self.softmax = softmax_triton

    def forward(self, taken: Tensor, weight: Tensor) -> Tensor:
        """Logits ``[n, v]`` of hidden states ``[n, h]`` for the weight ``[v, h]``."""
        if not self.in_float32:
            return taken @ weight.t()
        logits = taken.new_empty(len(taken), len(weight), dtype=torch.float32)
        taken = taken.float()
        for block in _blocks(weight):
            logits[:, block] = taken @ weight[block].float().t()
        return logits

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Gradient ``[n, h]`` of the hidden states, in the type of the product."""
        if not self.in_float32:
            return grad @ weight
        found = grad.new_zeros(len(grad), weight.size(1))
        for block in _blocks(weight):
            found += grad[:, block] @ weight[block].float()
        return found

    def add_weight_gradient(self, total: Tensor, grad: Tensor, taken: Tensor) -> None:
        """Add the chunk's gradient of the weight to ``total`` ``[v, h]``, in the type of
        ``total``."""
        taken = taken.to(grad.dtype)
        for block in _blocks(total):
            total[block].add_(grad[:, block].t() @ taken)


@dataclass(frozen=True)
class Head:
    """A rank's output layer."""

    weight: Tensor  # [v, h], the rank's slice; the embedding's where they are tied.
    product: HeadLinear  # Product for a chunk of rows.
    sequence_parallel: bool  # Whether tensor ranks have parts of the hidden states' rows.

    def log_probs(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor]:
        """:func:`rlmath.actor.logprobs.vocab_parallel_log_probs` of the head's logits.

        Differentiable in ``hidden`` and in the weight. Where Megatron's DDP gave the weight a
        ``main_grad``, its gradient is added to that in float32 at once, after which the weight's
        ``after_head`` is called, and autograd gets none; zeros where DDP waits for it
        (``actor.overlap_gradients``). ``hidden``: ``[t, h]``; under sequence parallelism this
        rank's part of it.
        """
        vocab = distribution.slice(len(self.weight))
        result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[assignment]
            hidden, self.weight, rows, targets, vocab, self.product, self.sequence_parallel
        )
        return result


def defer_logits(output_layer: Any, in_float32: bool, triton: bool = False) -> None:
    """Make the output layer return its input; :func:`head_of` then has the rest. ``output_layer``:
    Megatron's ``ColumnParallelLinear``. ``in_float32``: see :class:`HeadLinear`, as for ``triton``.
    """

    def hand_on(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden, None

    output_layer.chunk = HeadLinear(in_float32, triton)
    output_layer.forward = hand_on


def head_of(model: Any) -> Head | None:
    """The head of a rank's stage; ``None`` without an output layer, or if it gives whole logits."""
    layer = getattr(model, "output_layer", None)
    product = getattr(layer, "chunk", None)
    if layer is None or product is None:
        return None
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else layer.weight
    return Head(weight, product, layer.sequence_parallel)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        targets: Tensor,
        vocab: VocabSlice,
        product: HeadLinear,
        split: bool,
    ) -> tuple[Tensor, Tensor]:
        whole = _gather(hidden, vocab.group) if split else hidden
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_z = torch.empty(rows.numel(), dtype=dtype, device=hidden.device)
        entropy, log_probs = torch.empty_like(log_z), torch.empty_like(log_z)
        local, mine = vocab.places(targets)

        def take(chunk: slice) -> None:
            # A function, so that its logits are freed before the next chunk's are computed.
            logits = product(whole[rows[chunk]], weight)
            log_z[chunk], log_probs[chunk], entropy[chunk] = product.softmax.statistics(
                vocab, logits, local[chunk], mine[chunk]
            )

        for chunk in _chunks(rows, weight, product):
            take(chunk)
        ctx.save_for_backward(hidden, weight, rows, local, mine, log_z, entropy)
        ctx.vocab, ctx.product, ctx.split = vocab, product, split
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, rows, local, mine, log_z, entropy = ctx.saved_tensors
        vocab, product, split = ctx.vocab, ctx.product, ctx.split
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        whole = _gather(hidden, vocab.group) if split else hidden
        # Parts of a sum over tensor ranks keep the product's type until they are added up.
        dtype = log_z.dtype if split and product.in_float32 else hidden.dtype
        grad_hidden = torch.zeros_like(whole, dtype=dtype) if of_hidden else None
        total, main_grad = None, getattr(weight, "main_grad", None)
        if of_weight:
            # Megatron's hook adds what autograd leaves in ``grad`` to ``main_grad``: nothing of
            # this, and what the embedding has where the weight is its own as well. So
            # ``grad_added_to_main_grad``, which would have the hook pass over that, stays as it is.
            total = main_grad
            if total is None:
                kind = torch.promote_types(weight.dtype, torch.float32)
                total = torch.zeros_like(weight, dtype=kind)

        def give(chunk: slice) -> None:
            taken = whole[rows[chunk]]
            grad = product(taken, weight)
            product.softmax.write_gradient(
                vocab,
                grad,
                log_z[chunk],
                entropy[chunk],
                local[chunk],
                mine[chunk],
                grad_log_probs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )
            of_rows = work = None
            if grad_hidden is not None:
                of_rows = product.input_gradient(grad, weight)
                if vocab.group is not None and not split:
                    work = dist.all_reduce(of_rows, group=vocab.group, async_op=True)
            if total is not None:
                product.add_weight_gradient(total, grad, taken)
            if grad_hidden is not None and of_rows is not None:
                if work is not None:
                    work.wait()
                grad_hidden[rows[chunk]] = of_rows.to(dtype)

        for chunk in _chunks(rows, weight, product):
            give(chunk)
        if main_grad is not None and (after_head := getattr(weight, "after_head", None)):
            after_head()
        if grad_hidden is not None and split:
            grad_hidden = _reduce_scatter(grad_hidden, vocab.group).to(hidden.dtype)
        grad_weight = None
        if total is not None and main_grad is None:
            grad_weight = total.to(weight.dtype)
        elif total is not None and getattr(weight, "wants_gradient", False):
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, *[None] * 5


def _chunks(rows: Tensor, weight: Tensor, product: HeadLinear) -> Iterator[slice]:
    size = 4 if product.in_float32 else weight.element_size()
    step = rows_per_chunk(len(weight), size)
    for start in range(0, rows.numel(), step):
        yield slice(start, start + step)


def _blocks(weight: Tensor) -> Iterator[slice]:
    step = weight_rows_per_block(weight.size(1))
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _gather(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[t, h]`` of the tensor ranks' parts, in their order."""
    assert group is not None
    whole = hidden.new_empty(group.size() * hidden.size(0), hidden.size(1))
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
    return whole


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of the sum over ranks."""
    assert group is not None
    part = whole.new_empty(whole.size(0) // group.size(), whole.size(1))
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part
