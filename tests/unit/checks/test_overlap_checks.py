"""``algorithm.overlap_log_probs`` and ``overlap_update``: what leaves nothing to overlap, or makes
it impossible."""

from __future__ import annotations

import pytest

from rlmath.checks.overlap import overlap_problems
from rlmath.config.load import load
from rlmath.config.schema import Device

BASE = ["model.path=m", "runner.run_dir=r", "algorithm.overlap_log_probs=8"]
UPDATE = [
    *("model.path=m", "runner.run_dir=r", "algorithm.overlap_update=8"),
    *("algorithm.minibatches_per_step=1", "cluster.placement=separate"),
]
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
        (["cluster.placement=colocated"], "use cluster.placement=separate, or 0"),
        (["algorithm.minibatches_per_step=1"], "no pass for the old log-probs"),
        (["algorithm.old_log_probs=engine"], "algorithm.old_log_probs=engine"),
        (["rollout.schedule=pipelined"], "rollout.schedule=pipelined"),
        (["rollout.schedule=continuous"], "use rollout.schedule=synchronous"),
        (["algorithm.prompts_per_step=8"], "use less than 8"),
        (["algorithm.filter.oversample=1.5"], "oversample=1,"),
        (["actor.routing_replay=old_log_probs"], "use routing_replay=none"),
    ],
)
def test_what_is_refused_by_name(overrides: list[str], said: str) -> None:
    (found,) = problems(*overrides)
    assert found.startswith("algorithm.overlap_log_probs=8: ") and said in found


def problems_of_update(*overrides: str, device: Device = Device.cuda) -> list[str]:
    return list(overlap_problems(load([*UPDATE, *overrides]), device))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.advantage=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.02"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
        ["algorithm.correction.kind=seq_truncate", "algorithm.entropy_coef=0.01"],
        ["algorithm.old_log_probs=engine", "algorithm.filter.keep=variance"],
        ["algorithm.overlap_update=0", "algorithm.minibatches_per_step=4"],
    ],
)
def test_updates_that_can_be_made_in_parts(overrides: list[str]) -> None:
    assert problems_of_update(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.placement=colocated"], "use cluster.placement=separate, or 0"),
        (["rollout.schedule=carry_over"], "use rollout.schedule=synchronous"),
        (["algorithm.prompts_per_step=8"], "use less than 8"),
        (["algorithm.filter.oversample=1.5"], "oversample=1,"),
        (["actor.routing_replay=old_log_probs"], "use routing_replay=none"),
        (["algorithm.minibatches_per_step=2"], "or algorithm.overlap_log_probs"),
        (["actor.overlap_gradients=true"], "use overlap_gradients=false, or 0"),
        (["algorithm.advantage=gae"], "algorithm.advantage=gae needs"),
        (["algorithm.advantage=reinforce_pp"], "use one of dr_grpo, grpo"),
        (["algorithm.whiten_tokens=true"], "whiten_tokens=true is over all tokens"),
        (["algorithm.entropy_top_share=0.2"], "use 1, or 0"),
        (["algorithm.entropy_target=0.5"], "use null, or 0"),
        (["algorithm.correction.kind=auto"], "such as token_truncate"),
        (["algorithm.distill_coef=0.5"], "not known when the group is graded"),
    ],
)
def test_what_an_update_in_parts_is_refused_with(overrides: list[str], said: str) -> None:
    (found,) = problems_of_update(*overrides)
    assert found.startswith("algorithm.overlap_update=8: ") and said in found


def test_one_or_the_other() -> None:
    given = ("algorithm.overlap_log_probs=8", "algorithm.correction.kind=token_truncate")
    (found,) = problems_of_update(*given)
    assert found.startswith("algorithm.overlap_log_probs=8: algorithm.overlap_update=8 makes")
