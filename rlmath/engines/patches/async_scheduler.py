"""vLLM's asynchronous scheduler, as on GPUs, with a fast path for steps that only decode.

A step is scheduled while the one before it still computes, so a sequence has tokens that are on
their way ("output placeholders"), whose number is known and whose values are not. See
``short_steps.py``.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rlmath.engines.patches.short_steps import ShortSteps


class AsyncDecodeScheduler(ShortSteps, AsyncScheduler):  # type: ignore[misc]
    """A ``scheduler_cls`` of vLLM with asynchronous scheduling."""

    def _schedule_decodes(self) -> SchedulerOutput | None:
        chosen, of_blocks = self._choose()
        pool = self.kv_cache_manager.block_pool
        if not chosen or len(of_blocks) > pool.get_num_free_blocks():
            return None
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * len(chosen)
        for place in of_blocks:
            blocks = self.kv_cache_manager.allocate_slots(chosen[place], 1)
            assert blocks is not None, "as many blocks are free as there are sequences here"
            new_block_ids[place] = blocks.get_block_ids(allow_none=True)
        ids, num_computed_tokens, num_output_tokens = [], [], []
        for request in chosen:
            ids.append(request.request_id)
            num_computed_tokens.append(request.num_computed_tokens)
            num_output_tokens.append(
                len(request._output_token_ids) + request.num_output_placeholders
            )
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        fields = self._step(ids, new_block_ids, num_computed_tokens, num_output_tokens)
        return SchedulerOutput(**fields, new_block_ids_to_zero=self._get_new_block_ids_to_zero())

    def _choose(self) -> tuple[list[Request], list[int]]:
        """The sequences that get a token, and those of them that need a block or fill one; none if
        any needs more than that."""
        block_size, before = self.block_size, self.prev_step_scheduled_req_ids
        chosen: list[Request] = []
        of_blocks: list[int] = []
        for request in self.running:
            position, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and position + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # Its last token is on its way.
            length = len(request._all_token_ids)
            if (
                length + ahead - position != 1
                or request.is_prefill_chunk
                or request.spec_token_ids
                or not (self.use_v2_model_runner or request.request_id in before)
            ):
                return [], []
            if position >= self.max_model_len - 1:
                continue
            # vLLM caches a block once all of its tokens are known.
            if position % block_size == 0 or length % block_size == 0:
                of_blocks.append(len(chosen))
            chosen.append(request)
        return chosen, of_blocks

    def _append(self, request: Request, token_ids: list[int]) -> None:
        super()._append(request, token_ids)
        request.num_output_placeholders -= len(token_ids)
        known = request.num_computed_tokens - request.num_output_placeholders
        if known % self.block_size == 0:
            self.kv_cache_manager.cache_blocks(request, known)
