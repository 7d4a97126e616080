"""``rollout.arrays=engines``: what would bring a step's arrays to the driver."""

from __future__ import annotations

import pytest

from rlmath.checks.arrays import array_problems
from rlmath.config.load import load

BASE = ["model.path=m", "runner.run_dir=r"]
ENGINES = ["rollout.arrays=engines"]


def test_what_works() -> None:
    assert list(array_problems(load(BASE))) == []
    assert list(array_problems(load([*BASE, *ENGINES]))) == []
    for schedule in ("pipelined", "carry_over", "continuous"):
        assert list(array_problems(load([*BASE, *ENGINES, f"rollout.schedule={schedule}"]))) == []
    words = "reward.items=[{name: repetition_penalty, params: {unit: word}}]"
    assert list(array_problems(load([*BASE, *ENGINES, words]))) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.distill_coef=0.5"], "algorithm.distill_coef=0.5"),
        (["actor.routing_replay=engine"], "use routing_replay=old_log_probs"),
        (
            ["reward.items=[{name: repetition_penalty, params: {unit: token}}]"],
            "reward.items[0].params.unit=token",
        ),
    ],
)
def test_what_is_refused_by_name(overrides: list[str], said: str) -> None:
    (found,) = array_problems(load([*BASE, *ENGINES, *overrides]))
    assert found.startswith("rollout.arrays=engines: ") and said in found
    assert found.endswith("or arrays=driver")
