"""vLLM's scheduler with a short way for the steps that only decode.

vLLM 0.32 asks for every sequence in every step whether it needs memory, encoder inputs, drafts and
more, and walks through as many questions with every token that comes back: an eighth of the time of
a small model's step on CPU. Most steps of a rollout add one token to each running sequence inside
blocks that it has; those are scheduled here in one short loop, several at once
(``cpu_rounds.py``), and tokens that surely do not end their sequence are handed on in another.
Whatever else there is to do goes vLLM's way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rlmath.engines.patches.cpu_rounds import DecodeRounds
from rlmath.engines.patches.cpu_routes import returns_routes


class DecodeScheduler(Scheduler):
    """A ``scheduler_cls`` of vLLM for text models without drafts, several adapters and connectors.

    With any of those, or after the first request that asks for more than sampled tokens and their
    log-probs, it is vLLM's own scheduler.

    Attributes:
        max_rounds: Tokens of a sequence in one step, at most. What is asked of the engine meanwhile
            waits for them, and sequences that end on the way take part to the end.
        num_short_steps: Steps scheduled the short way so far.
    """

    max_rounds = 8

    prev_step_scheduled_req_ids: set[str]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if returns_routes():
            # vLLM makes it for its second model runner; the worker's half is in cpu_routes.py.
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self.num_short_steps = 0
        self._short: Any = None
        groups = self.kv_cache_config.kv_cache_groups
        self._plain = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
            and self.num_spec_tokens == 0
            and not (self.connector or self.ec_connector or self.aux_output_connector)
            and (self.lora_config is None or self.lora_config.max_loras == 1)
            and not (self.use_pp or self.use_v2_model_runner)
            and not (self.log_stats or self.perf_metrics or self.return_sampling_mask)
            and not (self.enable_kv_cache_events or self.scheduler_config.async_scheduling)
            and self.dcp_world_size == self.pcp_world_size == 1
            and _is_text_model(self.vllm_config)
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        )

    def add_request(self, request: Request) -> None:
        """See vLLM's method."""
        self._plain = self._plain and _is_plain(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See vLLM's method."""
        self._short = self._schedule_decodes()
        return self._short or super().schedule(throttle_prefills)  # type: ignore[no-any-return]

    def _schedule_decodes(self) -> SchedulerOutput | None:
        """One more token for every running sequence; ``None`` if that is not all there is to do."""
        running = self.running
        if (
            not self._plain
            or not running
            or (self.waiting and len(running) < self.max_num_active_reqs)
            or self.kv_holding_waiting
            or self._pause_state != PauseState.UNPAUSED
            or len(running) > self.max_num_scheduled_tokens
        ):
            return None
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
        num_computed_tokens, num_output_tokens = [], []
        for request in running:
            num_computed_tokens.append(request.num_computed_tokens)
            num_output_tokens.append(len(request._output_token_ids))
            request.num_computed_tokens += rounds
            request.num_in_flight_tokens += rounds
        ids = [request.request_id for request in running]
        self.current_step += 1
        self.num_short_steps += 1
        self.prev_step_scheduled_req_ids = set(ids)
        output = DecodeRounds(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(ids),
                num_computed_tokens=num_computed_tokens,
                num_output_tokens=num_output_tokens,
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.reset_preempted_req_ids,
            num_rounds=rounds,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's method."""
        if scheduler_output is not self._short or _has_more_than_tokens(model_runner_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        rounds, logprobs = self._short.num_rounds, model_runner_output.logprobs
        if len(model_runner_output.sampled_token_ids[0]) != rounds:
            raise RuntimeError(
                f"{rounds} tokens of each sequence were scheduled, but the worker sampled "
                f"{len(model_runner_output.sampled_token_ids[0])}: vLLM did not load "
                "rlmath's plugin there (cpu_rounds.py)"
            )
        outputs: dict[int, list[EngineCoreOutput]] = {}
        rest = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            row = model_runner_output.req_id_to_index[request_id]
            token_ids = model_runner_output.sampled_token_ids[row]
            if request is None or request.is_finished() or self._may_end(request, token_ids):
                rest[request_id] = rounds
                continue
            request.num_in_flight_tokens -= rounds
            request.append_output_token_ids(token_ids)
            outputs.setdefault(request.client_index, []).append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=token_ids,
                    new_logprobs=None if logprobs is None else logprobs.slice_request(row, rounds),
                    trace_headers=request.trace_headers,
                )
            )
        merged = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=rest), model_runner_output
        )
        for client, of_client in outputs.items():
            if client in merged:
                merged[client].outputs = of_client + merged[client].outputs
            else:
                merged[client] = EngineCoreOutputs(outputs=of_client)
        return merged

    def _may_end(self, request: Request, token_ids: list[int]) -> bool:
        """Whether vLLM has to look at these new tokens; if not, the sequence continues."""
        params = request.sampling_params
        assert params is not None
        count = len(token_ids)
        return (
            params.eos_token_id in token_ids
            or any(token in token_ids for token in params.stop_token_ids or ())
            or len(request._all_token_ids) + count >= self.max_model_len
            or len(request._output_token_ids) + count >= request.max_tokens
        )


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
        or output.pooler_output
        or output.prompt_logprobs_dict
        or output.prompt_token_id_logprobs_dict
        or output.num_nans_in_logits
        or output.kv_connector_output
        or output.ec_connector_output
    )
