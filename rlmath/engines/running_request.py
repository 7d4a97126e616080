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

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether the turn ends with one of its newest tokens; later ones are dropped."""
        kept = None if self.turn_end is None else self.turn_end.add(token_ids)
        if kept is not None and kept < len(token_ids):
            del self.token_ids[kept - len(token_ids) :], self.log_probs[kept - len(token_ids) :]
        return kept is not None

    @classmethod
    def of(cls, request: Request, tokenizer: Any) -> RunningRequest:
        """A request with the tokens of its begun part.

        Args:
            request: The request.
            tokenizer: Finds texts that end the turn.
        """
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
