"""What the driver wants to know of arrays that it does not get."""

from __future__ import annotations

from rlmath.monitor.digests import digest_log_probs, digest_tokens
from rlmath.monitor.repetition import repeated_ngrams
from rlmath.types import ArrayFigures, Sample


def array_figures(sample: Sample) -> ArrayFigures:
    """Of a sample whose arrays are here."""
    return ArrayFigures(
        digest_tokens(sample),
        digest_log_probs(sample),
        sample.log_prob(),
        repeated_ngrams(sample.token_ids),
    )
