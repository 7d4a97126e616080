"""``algorithm.overlap_log_probs``: what leaves nothing to overlap, or makes it impossible."""

from __future__ import annotations

import pytest

from rlmath.checks.overlap import overlap_problems
from rlmath.config.load import load
from rlmath.config.schema import Device

BASE = ["model.path=m", "runner.run_dir=r", "algorithm.overlap_log_probs=8"]
SEPARATE = "cluster.placement=separate"


def problems(*overrides: str, device: Device = Device.cuda) -> list[str]:
    return list(overlap_problems(load([*BASE, SEPARATE, *overrides]), device))


def test_what_works() -> None:
    assert problems() == []
    assert problems("cluster.placement=colocated", device=Device.cpu) == []
    one = "algorithm.minibatches_per_step=1"
    assert problems(one, "algorithm.correction.kind=token_truncate") == []
    assert problems("algorithm.overlap_log_probs=0", "cluster.placement=colocated") == []
    # Which samples as synchronous does.
    assert problems("rollout.schedule=pipelined", "rollout.max_lag=0") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.placement=colocated"], "take cluster.placement=separate, or 0"),
        (["algorithm.minibatches_per_step=1"], "no pass for the old log-probs"),
        (["algorithm.old_log_probs=engine"], "algorithm.old_log_probs=engine"),
        (["rollout.schedule=pipelined"], "rollout.schedule=pipelined"),
        (["rollout.schedule=continuous"], "take rollout.schedule=synchronous"),
        (["algorithm.prompts_per_step=8"], "take less than 8"),
        (["algorithm.filter.oversample=1.5"], "oversample=1,"),
        (["actor.routing_replay=old_log_probs"], "take routing_replay=none"),
    ],
)
def test_what_is_refused_by_name(overrides: list[str], said: str) -> None:
    (found,) = problems(*overrides)
    assert found.startswith("algorithm.overlap_log_probs=8: ") and said in found
