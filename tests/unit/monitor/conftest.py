import pytest

from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample


@pytest.fixture
def group():
    """One problem with a right sample and one that nothing could score."""
    problem = Problem("train.jsonl:3", "What is 1+1? é", (1, 2), ("2",), {"level": 1})
    common = {"version": 4, "engine": 1}
    right = {"log_probs": [-0.1, -0.2], "text": "\\boxed{2}", "seed": 11}
    right = make_sample(problem.id, 0, [5, 6], **right, **common)
    cut_off = {"text": "<b>1</b>\n\ud83d", "finish_reason": "length", "seed": 12}
    cut_off = make_sample(problem.id, 1, [5], log_probs=-0.3, **cut_off, **common)
    return Group(
        problem,
        (
            GradedSample(right, 5.0, True, "correct", "2", {"math": 5.0}, "exact"),
            GradedSample(cut_off, None, None, "timeout", None, {"math": float("nan")}),
        ),
    )
