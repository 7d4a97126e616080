import numpy as np
import pytest

from rlmath.types import GradedSample, Group, Problem, Sample


@pytest.fixture
def group():
    """One problem with a right sample and one that nothing could score."""
    problem = Problem("train.jsonl:3", "What is 1+1? é", (1, 2), ("2",), {"level": 1})
    common = {"problem_id": problem.id, "spans": ((4, 0),), "engine": 1}
    right = Sample(
        index=0,
        token_ids=np.array([5, 6], np.int32),
        log_probs=np.array([-0.1, -0.2], np.float32),
        text="\\boxed{2}",
        finish_reason="stop",
        seed=11,
        **common,
    )
    cut_off = Sample(
        index=1,
        token_ids=np.array([5], np.int32),
        log_probs=np.array([-0.3], np.float32),
        text="<b>1</b>\n\ud83d",
        finish_reason="length",
        seed=12,
        **common,
    )
    return Group(
        problem,
        (
            GradedSample(right, 5.0, True, "correct", "2", {"math": 5.0}, "exact"),
            GradedSample(cut_off, None, None, "timeout", None, {"math": float("nan")}),
        ),
    )
