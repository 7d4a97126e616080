"""vLLM's scheduler on CPU, with a fast path that runs several decoding steps at once.

The steps are those that need no block of keys and values (``short_steps.py``); the worker runs as
many as fit into all sequences' last blocks (``cpu_rounds.py``).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from rlmath.engines.patches.cpu_rounds import DecodeRounds
from rlmath.engines.patches.cpu_routes import returns_routes
from rlmath.engines.patches.short_steps import ShortSteps


class DecodeScheduler(ShortSteps):
    """A ``scheduler_cls`` of vLLM without asynchronous scheduling. ``max_rounds``: most tokens of a
    sequence in one step. New requests wait for the step, and sequences that end within it are
    computed to its end."""

    max_rounds = 8

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if returns_routes():
            # vLLM makes it for its second model runner; the worker's half is in cpu_routes.py.
            self.aux_output_connector = AuxOutputSchedulerConnector()
            self.is_plain = False

    def _schedule_decodes(self) -> SchedulerOutput | None:
        running = self.running
        block_size, before = self.block_size, self.prev_step_scheduled_req_ids
        rounds = self.max_rounds
        for request in running:
            position = request.num_computed_tokens
            place, length = position % block_size, len(request._all_token_ids)
            # A block's first token needs the block, and after its last one vLLM may cache it.
            if (
                place == 0
                or place == block_size - 1
                or length - position != 1
                or request.request_id not in before
            ):
                return None
            left = request.max_tokens - len(request._output_token_ids)
            rounds = min(rounds, block_size - 1 - place, left, self.max_model_len - length)
        ids, num_computed_tokens, num_output_tokens = [], [], []
        for request in running:
            ids.append(request.request_id)
            num_computed_tokens.append(request.num_computed_tokens)
            num_output_tokens.append(len(request._output_token_ids))
            request.num_computed_tokens += rounds
            request.num_in_flight_tokens += rounds
        fields = self._step(ids, [None] * len(ids), num_computed_tokens, num_output_tokens)
        return DecodeRounds(**fields, num_rounds=rounds)

    def _rounds(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> int:
        assert isinstance(scheduled, DecodeRounds)
        found = len(output.sampled_token_ids[0])
        if found != scheduled.num_rounds:
            raise RuntimeError(
                f"{scheduled.num_rounds} tokens of each sequence were scheduled, but the worker "
                f"sampled {found}: vLLM did not load rlmath's plugin there (cpu_rounds.py)"
            )
        return found
