"""Values of each response token from a pass of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a micro-batch, or of all on a rank."""

    response_rows: Tensor  # [r] int64, their indices among the R response tokens.
    log_probs: Tensor  # [r] float32.
    entropy: Tensor  # [r] float32, in nats.
    sequence_sums: Tensor | None = None  # Sums of an update's micro-batch, see sums_of_sequences.
