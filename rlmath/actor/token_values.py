"""Values of each response token from a pass of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a micro-batch, or of all on a rank.

    Attributes:
        response_rows: ``[r]`` int64, their indices among the ``R`` response tokens.
        log_probs: ``[r]`` float32.
        entropy: ``[r]`` float32, in nats.
        sequence_sums: Sums of an update's micro-batch, see ``sums_of_sequences``.
    """

    response_rows: Tensor
    log_probs: Tensor
    entropy: Tensor
    sequence_sums: Tensor | None = None
