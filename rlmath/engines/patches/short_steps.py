"""A fast path through vLLM's scheduler for steps that only decode.

vLLM 0.32 asks for every sequence in every step whether it needs memory, encoder inputs, drafts and
more, walks through as many questions with every token that comes back, and makes an object of each.
Most steps of a rollout add one token to each running sequence. Those are scheduled here in one
short loop, and tokens that surely do not end their sequence are handed on as arrays
(:class:`DecodedTokens`). Whatever else there is to do goes vLLM's way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class DecodedTokens:
    """New tokens of sequences that continue."""

    ids: list[str]  # Requests.
    tokens: NDArray[np.int32]  # [len(ids), n] int32.
    log_probs: NDArray[np.float32]  # [len(ids), n] float32, of the sampled tokens.


class StepOutputs(EngineCoreOutputs, gc=True):  # type: ignore[call-arg]
    """Outputs of a step, with tokens that are in ``decoded`` and not in ``outputs``."""

    decoded: DecodedTokens | None = None


class ShortSteps(Scheduler):
    """A base of ``scheduler_cls`` for text models without drafts, several adapters and connectors.

    With any of those, or after the first request that asks for more than sampled tokens and their
    log-probs, it is vLLM's own scheduler.

    Attributes:
        is_plain: Whether the fast path may be taken.
        num_short_steps: Steps on the fast path so far.
    """

    prev_step_scheduled_req_ids: set[str]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_short_steps = 0
        self._in_flight: deque[SchedulerOutput] = deque()
        groups = self.kv_cache_config.kv_cache_groups
        self.is_plain = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
            and self.num_spec_tokens == 0
            and not (self.connector or self.ec_connector or self.aux_output_connector)
            and (self.lora_config is None or self.lora_config.max_loras == 1)
            and not (self.use_pp or self.log_stats or self.perf_metrics)
            and not (self.return_sampling_mask or self.enable_kv_cache_events)
            and self.dcp_world_size == self.pcp_world_size == 1
            and _is_text_model(self.vllm_config)
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        )

    def add_request(self, request: Request) -> None:
        """See vLLM's method."""
        self.is_plain = self.is_plain and _is_plain(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See vLLM's method."""
        running = self.running
        short = None
        if not (
            not self.is_plain
            or not running
            or (self.waiting and len(running) < self.max_num_active_reqs)
            or self.kv_holding_waiting
            or self._pause_state != PauseState.UNPAUSED
            or len(running) > self.max_num_scheduled_tokens
        ):
            short = self._schedule_decodes()
        if short is None:
            return super().schedule(throttle_prefills)  # type: ignore[no-any-return]
        self.current_step += 1
        self.num_short_steps += 1
        self._in_flight.append(short)
        return short

    def _schedule_decodes(self) -> SchedulerOutput | None:
        """One more token for every running sequence; ``None`` if that is not all there is to do."""
        raise NotImplementedError

    def _step(
        self,
        ids: list[str],
        new_block_ids: Sequence[tuple[list[int], ...] | None],
        num_computed_tokens: list[int],
        num_output_tokens: list[int],
    ) -> dict[str, Any]:
        """Fields of a step of one token for each of these requests."""
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(ids)
        fields: dict[str, Any] = {
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=list(new_block_ids),
                num_computed_tokens=num_computed_tokens,
                num_output_tokens=num_output_tokens,
            ),
            "num_scheduled_tokens": dict.fromkeys(ids, 1),
            "total_num_scheduled_tokens": len(ids),
            "scheduled_spec_decode_tokens": {},
            "scheduled_encoder_inputs": {},
            "finished_req_ids": self.finished_req_ids,
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": self.reset_preempted_req_ids,
        }
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return fields

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's method."""
        if not self._in_flight or self._in_flight[0] is not scheduler_output:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._in_flight.popleft()
        if _has_more_than_tokens(model_runner_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        rounds = self._rounds(scheduler_output, model_runner_output)
        rows, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        ids, places, tokens, rest = [], [], [], {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request, row = self.requests.get(request_id), rows[request_id]
            token_ids = sampled[row]
            if request is None or self._may_end(request, token_ids):
                rest[request_id] = rounds
                continue
            self._append(request, token_ids)
            ids.append(request_id)
            places.append(row)
            tokens += token_ids
        merged = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=rest), model_runner_output
        )
        if ids:
            of_others = merged[0].outputs if 0 in merged else []
            log_probs = _log_probs(model_runner_output.logprobs, places, rounds)
            of_ids = np.array(tokens, np.int32).reshape(len(ids), rounds)
            decoded = DecodedTokens(ids, of_ids, log_probs)
            merged[0] = StepOutputs(outputs=of_others, decoded=decoded)
        return merged

    def _rounds(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> int:
        """Tokens that every sequence of a short step gets."""
        return 1

    def _append(self, request: Request, token_ids: list[int]) -> None:
        """Add new tokens to a request that continues."""
        request.num_in_flight_tokens -= len(token_ids)
        request.append_output_token_ids(token_ids)

    def _may_end(self, request: Request, token_ids: list[int]) -> bool:
        """Whether vLLM has to look at these new tokens; if not, the sequence continues."""
        params = request.sampling_params
        assert params is not None
        count = len(token_ids)
        return (
            request.status != RequestStatus.RUNNING
            or request.num_stale_output_tokens > 0
            or params.eos_token_id in token_ids
            or any(token in token_ids for token in params.stop_token_ids or ())
            or len(request._all_token_ids) + count >= self.max_model_len
            or len(request._output_token_ids) + count >= request.max_tokens
        )


def _log_probs(logprobs: Any, places: list[int], rounds: int) -> NDArray[np.float32]:
    """``[len(places), rounds]`` log-probs of sampled tokens; ``places``: rows of the output."""
    # Column 0 is the sampled token; a row of the output has a row here for each of its tokens.
    sampled, starts = logprobs.logprobs[:, 0], logprobs.cu_num_generated_tokens
    first = np.array(places if starts is None else [starts[place] for place in places])
    found: NDArray[np.float32] = sampled[first[:, None] + np.arange(rounds)]
    return found.astype(np.float32, copy=False)


def _is_text_model(config: VllmConfig) -> bool:
    """Whether the model takes tokens and positions ``[n]``, and nothing else."""
    model = config.model_config
    return not (
        model.is_multimodal_model
        or model.uses_mrope
        or model.is_encoder_decoder
        or model.enable_prompt_embeds
        or config.cache_config.kv_sharing_fast_prefill
    )


def _is_plain(request: Request) -> bool:
    params = request.sampling_params
    return (
        params is not None
        and not _reads_its_tokens(params)
        and params.prompt_logprobs is None
        and params.repetition_detection is None
        and request.client_index == 0
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and not request.resumable
    )


def _reads_its_tokens(params: SamplingParams) -> bool:
    """Whether the next token's logits are changed, which vLLM prepares between two steps."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.min_tokens
        or params.bad_words
        or params.logit_bias
        or params.allowed_token_ids
    )


def _has_more_than_tokens(output: ModelRunnerOutput) -> bool:
    return bool(
        not output.sampled_token_ids
        or output.logprobs is None
        or output.pooler_output
        or output.prompt_logprobs_dict
        or output.prompt_token_id_logprobs_dict
        or output.num_nans_in_logits
        or output.kv_connector_output
        or output.ec_connector_output
    )
