"""Responses that no engine sampled, to try rewards and checks with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlmath.types import Sample


def made_sample(
    problem_id: str, index: int, token_ids: Sequence[int], text: str, seed: int = 0
) -> Sample:
    return Sample(
        problem_id=problem_id,
        index=index,
        token_ids=np.array([*token_ids], np.int32),
        log_probs=np.full(len(token_ids), -0.5, np.float32),
        text=text,
        finish_reason="stop",
        spans=((0, 0),),
        seed=seed or index,
        engine=0,
    )
