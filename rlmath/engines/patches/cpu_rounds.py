"""Several tokens for each sequence between two visits to vLLM's scheduler.

Where every sequence of a step adds one token, in a block that it has, the next step differs in
numbers alone: the token that was just sampled, and a position that is one higher. vLLM 0.32
nevertheless visits all its state after each token. Here the worker runs as many such steps
("rounds") as ``cpu_scheduler.py`` asks for, and returns the tokens of all of them at once, in the
form of drafts that were accepted. A sequence that ends in between takes part in the remaining
rounds; vLLM drops what follows its end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_vllm_sample_tokens = CPUModelRunner.sample_tokens


@dataclass
class DecodeRounds(SchedulerOutput):
    """A step of one token for each running sequence, and steps like it right after it."""

    # How many steps, which is how many tokens each sequence gets. All of them have a place in its
    # last block.
    num_rounds: int = 1


@torch.inference_mode()
def sample_tokens(self: CPUModelRunner, grammar_output: Any) -> Any:
    """Sample from the step's logits, then run and sample the rounds that follow; see vLLM's
    method."""
    state = self.execute_model_state
    rounds = getattr(state.scheduler_output, "num_rounds", 1) if state is not None else 1
    if rounds == 1:
        return _vllm_sample_tokens(self, grammar_output)
    self.execute_model_state = None
    n = self.input_batch.num_reqs
    sampled = [self._sample(state.logits, None)]
    for _ in range(rounds - 1):
        _advance(self, sampled[-1].sampled_token_ids)
        with _as_next_step(self, n, state.slot_mappings):
            hidden = self._model_forward(
                input_ids=self.input_ids.gpu[:n], positions=self.positions[:n]
            )
        sampled.append(self._sample(self.model.compute_logits(hidden), None))
    return _output(self, sampled)


def _advance(runner: Any, tokens: Tensor) -> None:
    """Put the next step's inputs where vLLM has those of this one. ``tokens``: ``[n, 1]``, sampled
    last."""
    n = tokens.size(0)
    runner.input_ids.gpu[:n] = tokens[:, 0]
    runner.positions[:n] += 1
    runner.seq_lens[:n] += 1
    runner.optimistic_seq_lens_cpu[:n] += 1
    slots = runner.input_batch.block_table[0].slot_mapping.gpu[:n]
    slots += 1


def _as_next_step(runner: Any, n: int, slot_mappings: Any) -> AbstractContextManager[None]:
    """The forward context of a step of ``n`` sequences. ``slot_mappings``: the previous step's, by
    layer; views of the runner's table of slots."""
    slots = runner.input_batch.block_table[0].slot_mapping.gpu[:n]
    attention, _ = runner._build_attention_metadata(
        num_tokens=n, num_reqs=n, max_query_len=1, slot_mappings={0: slots}
    )
    context: AbstractContextManager[None] = set_forward_context(
        attention, runner.vllm_config, num_tokens=n, slot_mapping=slot_mappings
    )
    return context


def _output(runner: Any, sampled: list[SamplerOutput]) -> ModelRunnerOutput:
    """Record the tokens of all rounds as vLLM's bookkeeping does those of one step."""
    batch, rounds = runner.input_batch, len(sampled)
    n = batch.num_reqs
    tokens = torch.cat([one.sampled_token_ids for one in sampled], 1).numpy()
    columns = batch.num_tokens_no_spec[:n, None] + np.arange(rounds)
    rows = np.arange(n)[:, None]
    batch.token_ids_cpu[rows, columns] = tokens
    batch.is_token_ids[rows, columns] = True
    batch.num_tokens_no_spec[:n] += rounds
    lists = tokens.tolist()
    for request_id, new in zip(batch.req_ids, lists, strict=True):
        runner.requests[request_id].output_token_ids.extend(new)
    return ModelRunnerOutput(
        req_ids=batch.req_ids.copy(),
        req_id_to_index=batch.req_id_to_index.copy(),
        sampled_token_ids=lists,
        logprobs=_log_probs(sampled),
    )


def _log_probs(sampled: list[SamplerOutput]) -> LogprobsLists | None:
    """Each sequence's own, one after another."""
    tables = [one.logprobs_tensors for one in sampled]
    if tables[0] is None:
        return None
    n, rounds = len(tables[0].logprobs), len(tables)
    ids, log_probs = (
        torch.stack([getattr(one, name) for one in tables], 1).flatten(0, 1).numpy()
        for name in ("logprob_token_ids", "logprobs")
    )
    ranks = torch.stack([one.selected_token_ranks for one in tables], 1).flatten().numpy()
    return LogprobsLists(ids, log_probs, ranks, list(range(0, n * rounds + 1, rounds)))


def install() -> None:
    """Let this process's CPU workers run rounds."""
    CPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign]
