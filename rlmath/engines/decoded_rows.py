"""Tokens of running sequences as arrays, until a sequence is read.

Most steps add tokens to the same sequences as the step before. Their arrays are kept as they are,
and cut into sequences when these change, so that a step costs the same for one and for a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlmath.engines.running_request import RunningRequest

if TYPE_CHECKING:
    from rlmath.engines.patches.short_steps import DecodedTokens


class DecodedRows:
    """The tokens since the last :meth:`flush`, all of the same sequences and weights version."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._requests: list[RunningRequest] = []
        self._version = 0
        self._steps: list[DecodedTokens] = []
        # Rows of requests with texts that end a turn.
        self._watched: list[tuple[int, RunningRequest]] = []

    def add(
        self, decoded: DecodedTokens, version: int, running: Mapping[str, RunningRequest]
    ) -> None:
        """Keep the tokens of a step. ``version``: weights version that sampled them. ``running``:
        requests by ID."""
        if decoded.ids != self._ids or version != self._version:
            self.flush()
            self._ids, self._version = decoded.ids, version
            self._requests = [running[request_id] for request_id in decoded.ids]
            rows = enumerate(self._requests)
            self._watched = [(row, one) for row, one in rows if one.turn_end is not None]
        self._steps.append(decoded)

    def ended_turns(self) -> list[str]:
        """Requests whose turn ends with one of the newest tokens; later ones are dropped."""
        if not self._watched:
            return []
        newest, ended = self._steps[-1].tokens, []
        for row, request in self._watched:
            assert request.turn_end is not None
            kept = request.turn_end.add(newest[row].tolist())
            if kept is not None:
                self.flush()
                request.drop(newest.shape[1] - kept)
                ended.append(self._ids[row])
        return ended

    def flush(self) -> None:
        """Give each sequence its tokens and log-probs."""
        if not self._steps:
            return
        tokens = np.concatenate([step.tokens for step in self._steps], axis=1)
        log_probs = np.concatenate([step.log_probs for step in self._steps], axis=1)
        for request, its_tokens, its_log_probs in zip(
            self._requests, tokens, log_probs, strict=True
        ):
            request.begin(self._version)
            request.token_ids.frombytes(its_tokens.tobytes())
            request.log_probs.frombytes(its_log_probs.tobytes())
        self._steps.clear()

    def clear(self) -> None:
        self._steps.clear()
        self._ids, self._requests, self._watched = [], [], []
