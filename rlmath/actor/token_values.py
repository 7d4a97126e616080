"""What a pass of the policy gives for each response token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a micro-batch, or of all that a rank has.

    Attributes:
        response_rows: ``[r]`` int64, which of the ``R`` response tokens they are.
        log_probs: ``[r]`` float32.
        entropy: ``[r]`` float32, in nats.
        sequence_sums: Of an update's micro-batch, see ``sums_of_sequences``.
    """

    response_rows: Tensor
    log_probs: Tensor
    entropy: Tensor
    sequence_sums: Tensor | None = None
