"""A request in an engine and its output so far."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmath.engines.requests import Request
from rlmath.engines.turn_end import TurnEnd


@dataclass
class RunningRequest:
    """A request in the engine and its output so far."""

    request: Request
    spans: list[tuple[int, int]] = field(default_factory=list)
    token_ids: array.array[int] = field(default_factory=lambda: array.array("i"))
    log_probs: array.array[float] = field(default_factory=lambda: array.array("f"))
    # For a request that scores: log-probs of each token of the prompt except the first.
    prompt_log_probs: np.ndarray[Any, np.dtype[np.float32]] | None = None
    # For a request that wants routes: vLLM's rows of the tokens after those that it already has.
    routes: list[np.ndarray[Any, Any]] = field(default_factory=list)
    prompt_digest: int = 0
    # For a request with texts that end the turn.
    turn_end: TurnEnd | None = None

    def begin(self, version: int) -> None:
        """Note which weights sample the tokens from now on."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.token_ids)))

    def take(self, output: Any, version: int) -> int:
        """Add the tokens that vLLM's engine core returned for it. ``output``: vLLM's
        ``EngineCoreOutput``. ``version``: weights version of the step. Returns tokens of its begun
        part that were still in the KV cache."""
        if output.new_token_ids:
            self.begin(version)
        self.token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            # Column 0 is the sampled token.
            sampled = output.new_logprobs.logprobs[:, 0]
            self.log_probs.frombytes(sampled.astype(np.float32, copy=False).tobytes())
        if output.routed_experts is not None and self.request.wants_routes:
            self.routes.append(output.routed_experts)
        if output.new_prompt_logprobs_tensors is not None:
            of_prompt = output.new_prompt_logprobs_tensors.logprobs[:, 0]
            self.prompt_log_probs = of_prompt.float().numpy()
        if output.prefill_stats is None or not self.request.begun_tokens:
            return 0
        return int(output.prefill_stats.num_cached_tokens)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether the turn ends with one of its newest tokens; later ones are dropped."""
        kept = None if self.turn_end is None else self.turn_end.add(token_ids)
        if kept is not None:
            self.drop(len(token_ids) - kept)
        return kept is not None

    def drop(self, count: int) -> None:
        if count:
            del self.token_ids[-count:], self.log_probs[-count:]

    @classmethod
    def of(cls, request: Request, tokenizer: Any) -> RunningRequest:
        """A request with the tokens of its begun part. ``tokenizer``: finds texts that end the
        turn."""
        running, begun = cls(request), request.begun
        if begun is not None:
            running.token_ids.frombytes(np.asarray(begun.token_ids, np.int32).tobytes())
            running.log_probs.frombytes(np.asarray(begun.log_probs, np.float32).tobytes())
            if request.begun_tokens:
                running.spans += begun.spans
        if request.stop:
            start = 0 if begun is None else begun.segments[-1][1]
            running.turn_end = TurnEnd(tokenizer, request.stop, running.token_ids[start:])
        return running
