"""Run micro-batches through Megatron's pipeline schedule and collect the last stage's results.

Between the first micro-batch and the last the host only queues work: what a callback keeps stays on
the device until the schedule is done, and its inputs were copied there before. The host waits for
the GPU only in MoE layers, for the number of tokens per expert, which Megatron needs to allocate;
after each message between pipeline stages that are not interleaved (Megatron's ``batch_p2p_sync``);
and after the schedule for a minibatch's sums and its gradient norm, which decide whether the
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlmath.actor.context import all_gather_context
from rlmath.actor.experts import release_routing
from rlmath.actor.fp8 import copies_of_weights
from rlmath.actor.head import Head
from rlmath.actor.logprobs import Distribution, vocab_parallel_log_probs
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.stops import stops

T = TypeVar("T")

# (micro-batch, the model's output [t, ...]) -> (loss, value to keep)
OnOutput = Callable[[PackedMicroBatch, Tensor], tuple[Tensor, T]]
# (micro-batch, log-probs [r], entropies [r]) -> (loss, value to keep)
OnLogProbs = Callable[[PackedMicroBatch, Tensor, Tensor], tuple[Tensor, T]]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[PackedMicroBatch],
    on_output: OnOutput[T],
    *,
    backward: bool,
    shortest: PackedMicroBatch,
) -> list[T]:
    """Run forward, and optionally backward, of each micro-batch.

    With ``backward`` the gradients are summed over micro-batches and data-parallel ranks in
    Megatron's gradient buffers, without any division.

    Args:
        chunks: This rank's stage; with several, Megatron interleaves them.
        micro_batches: Micro-batches of this rank's data-parallel share; as many on each rank.
        on_output: Called once per micro-batch, on ranks of the last stage.
        shortest: Replaces micro-batches that are skipped when the ranks are asked to stop.

    Returns:
        Values kept by ``on_output`` per micro-batch, in order; empty on other stages.

    Raises:
        UpdateStopped: Micro-batches were skipped; the gradients must be dropped.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_attr_wrapped_model

    def take(number: int) -> PackedMicroBatch:
        return shortest if stops.skips(number) else micro_batches[number]

    def forward_step(left: Iterator[int], module: torch.nn.Module) -> Any:
        one = take(next(left))
        output = module(one.tokens, one.position_ids, None, packed_seq_params=one.packed_seq_params)

        def loss_of(result: Tensor) -> Any:
            loss, kept = on_output(one, result.squeeze(0))
            # The third form of Megatron's loss functions: with calculate_per_token_loss it leaves
            # the loss unchanged. The loss includes its denominator, so the count is unused.
            return loss, torch.zeros([], dtype=torch.int, device=loss.device), kept

        return output, loss_of

    several, numbers = len(chunks) > 1, range(len(micro_batches))
    with copies_of_weights(chunks), stops.running(len(numbers)):
        kept: list[T] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(numbers) for _ in chunks] if several else iter(numbers),
            model=list(chunks),
            num_microbatches=len(numbers),
            seq_length=max(one.tokens.size(1) for one in micro_batches),
            micro_batch_size=1,
            forward_only=not backward,
            **_messages(chunks, len(numbers), lambda number: take(number).tokens.size(1)),
        )
    for chunk in chunks:
        release_routing(chunk)
        # Else it keeps its last input, and the gradient: 224 MiB for 16,384 tokens of a 7B model.
        get_attr_wrapped_model(chunk, "set_input_tensor")(None)
    return kept


def _messages(
    chunks: Sequence[torch.nn.Module], micro_batches: int, tokens_of: Callable[[int], int]
) -> dict[str, Any]:
    """Arguments of Megatron's schedule for its messages; empty on a single stage."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {}
    from rlmath.actor.stage_messages import StageMessages

    messages = StageMessages(chunks, micro_batches, tokens_of)
    return {"p2p_communicator": messages, "pg_collection": messages.groups}


def of_log_probs(
    function: OnLogProbs[T],
    *,
    temperature: float,
    vocab_size: int,
    batch_invariant: bool = False,
    head: Head | None = None,
) -> OnOutput[T]:
    """Convert a function of log-probs to one of the model's output, for ``run_schedule``.

    Args:
        function: Takes the log-probs and entropies of the micro-batch's response tokens.
        vocab_size: Vocabulary size of the model, without padding.
        batch_invariant: As in :class:`rlmath.actor.logprobs.Distribution`.
        head: The model's head, if its output is hidden states; ``None``: it is logits.
    """
    from megatron.core import parallel_state

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group() if tp_size > 1 else None
    distribution = Distribution(
        temperature=temperature,
        vocab_size=vocab_size,
        rank=parallel_state.get_tensor_model_parallel_rank(),
        group=group,
        batch_invariant=batch_invariant,
    )
    log_probs_of = vocab_parallel_log_probs if head is None else head.log_probs

    def on_output(one: PackedMicroBatch, output: Tensor) -> tuple[Tensor, T]:
        log_probs, entropy = log_probs_of(output, one.rows, one.targets, distribution)
        return function(
            one,
            all_gather_context(log_probs, one.context),
            all_gather_context(entropy, one.context),
        )

    return on_output
