"""``rollout.schedule`` and its numbers: what is refused, and what ``--check`` says of it."""

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.checks.overview import describe_training
from rlmath.checks.pairs import pair_problems
from rlmath.checks.run import check
from rlmath.config.load import load
from rlmath.config.rollout import Overlap, overlap_of
from rlmath.config.schema import Device
from rlmath.errors import ConfigError
from tests.unit.checks.config_cases import GPU_MACHINE

BASE = ["model.path=m", "runner.run_dir=r", "rollout.schedule=carry_over"]
BUDGET = "rollout.cut_after_tokens=4096"
CORRECTED = "algorithm.correction.kind=token_truncate"


def problems(*overrides):
    return problems_of([*BASE, *overrides])


def problems_of(overrides):
    config = load(overrides)
    return [*pair_problems(config, Device.cuda, "train"), *algorithm_problems(config)]


@pytest.mark.parametrize(
    "overrides",
    [
        [BUDGET, CORRECTED],
        [BUDGET, "algorithm.correction.veto_below=1e-4"],
        [BUDGET, "rollout.max_lag=0"],
        [BUDGET, "rollout.allow_uncorrected=true"],
        [BUDGET, CORRECTED, "algorithm.loss=reinforce", "rollout.allow_uncorrected=true"],
    ],
)
def test_schedule_settings_that_pass(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(
    ("name", "numbers", "overlap"),
    [
        ("synchronous", [], Overlap()),
        ("carry_over", ["rollout.cut_after_tokens=2048"], Overlap(2, 2048)),
        ("pipelined", ["rollout.max_lag=1"], Overlap(1)),
        ("continuous", ["rollout.cut_after_tokens=0"], Overlap(2, 0)),
    ],
)
def test_schedule_name_and_its_numbers_are_the_same(name, numbers, overlap):
    given = ["model.path=m", "runner.run_dir=r", "rollout.max_response_tokens=8192"]
    named, numbered = load([*given, f"rollout.schedule={name}"]), load([*given, *numbers])
    assert overlap_of(named.rollout) == overlap_of(numbered.rollout) == overlap
    assert overlap.name == name
    assert describe_training(named) == describe_training(numbered)
    both = [*given, CORRECTED, f"rollout.schedule={name}", *numbers]
    assert problems_of(both) == problems_of([*given, CORRECTED, *numbers]) == []


@pytest.mark.parametrize(
    ("name", "numbers", "is_of"),
    [
        ("synchronous", ["rollout.max_lag=1"], "pipelined"),
        ("synchronous", ["rollout.cut_after_tokens=4096"], "carry_over"),
        ("synchronous", ["rollout.cut_after_tokens=0", "rollout.max_lag=3"], "continuous"),
        ("carry_over", ["rollout.cut_after_tokens=0"], "continuous"),
        ("pipelined", ["rollout.cut_after_tokens=4096"], "carry_over"),
        ("pipelined", ["rollout.cut_after_tokens=0"], "continuous"),
        ("continuous", ["rollout.cut_after_tokens=9", "rollout.max_lag=1"], "carry_over"),
        ("continuous", ["rollout.cut_after_tokens=9", "rollout.max_lag=0"], "synchronous"),
    ],
)
def test_schedule_name_with_numbers_of_another_is_one_message(name, numbers, is_of):
    given = ["model.path=m", "runner.run_dir=r", f"rollout.schedule={name}", *numbers]
    (found,) = problems_of(given)
    assert found.startswith(f"rollout.schedule={name} contradicts ")
    assert f", of rollout.schedule={is_of};" in found
    assert all(number in found for number in numbers)


def test_tokens_of_older_weights_are_corrected_for_or_it_is_asked_for():
    (found,) = problems(BUDGET, "rollout.max_lag=3")
    assert "algorithm.correction.kind=none" in found and "rollout.max_lag=3 steps older" in found
    assert "use token_truncate, or rollout.allow_uncorrected=true" in found
    (found,) = problems(BUDGET, CORRECTED, "algorithm.loss=reinforce")
    assert "algorithm.loss=reinforce: does not bound the importance ratio; use ppo_clip" in found


def test_unused_allow_uncorrected_is_refused():
    (found,) = problems(BUDGET, CORRECTED, "rollout.allow_uncorrected=true")
    assert "rollout.allow_uncorrected=true: does nothing" in found
    for schedule in ([], ["rollout.schedule=synchronous"]):
        config = load([*BASE[:2], *schedule, "rollout.allow_uncorrected=true"])
        (found,) = algorithm_problems(config)
        assert "rollout.allow_uncorrected=true: does nothing" in found


def test_check_describes_carry_over():
    text = describe_training(load([*BASE, BUDGET, CORRECTED]))
    assert "carry_over: 4,096 tokens a step, at most 2 steps older" in text
    text = describe_training(load([*BASE, BUDGET, "rollout.allow_uncorrected=true"]))
    assert "older tokens are not corrected for" in text
    assert "carry_over" not in describe_training(load(BASE[:2]))


PIPELINED = ["model.path=m", "runner.run_dir=r", "rollout.schedule=pipelined"]


def pipelined_problems(*overrides):
    return problems_of([*PIPELINED, *overrides])


def test_pipelined_needs_a_correction_and_no_more_groups_than_it_trains():
    assert pipelined_problems(CORRECTED) == pipelined_problems("rollout.max_lag=0") == []
    (found,) = pipelined_problems()
    assert "with rollout.schedule=pipelined tokens are up to rollout.max_lag=1 steps" in found
    assert problems_of([*PIPELINED[:2], CORRECTED, "rollout.max_lag=2"]) == pipelined_problems(
        CORRECTED, "rollout.max_lag=2"
    )
    (found,) = pipelined_problems(CORRECTED, "rollout.max_lag=2")
    assert "rollout.max_lag=2: rollout.schedule=pipelined samples one step ahead" in found
    rules = ["algorithm.filter.keep=variance", "algorithm.filter.max_rounds=4"]
    (found,) = pipelined_problems(CORRECTED, *rules, "algorithm.filter.oversample=1.5")
    assert "would be trained two steps after" in found
    text = describe_training(load([*PIPELINED, CORRECTED]))
    assert "pipelined: engines sample the next step while the actor trains" in text


CONTINUOUS = ["model.path=m", "runner.run_dir=r", "rollout.schedule=continuous"]


def continuous(*overrides):
    return problems_of([*CONTINUOUS, *overrides])


def test_continuous_needs_a_correction_and_has_no_more_groups_to_spare():
    assert continuous(CORRECTED) == continuous("rollout.max_lag=0") == []
    assert continuous(CORRECTED, "rollout.max_lag=8") == []
    (found,) = continuous()
    assert "with rollout.schedule=continuous tokens are up to rollout.max_lag=2 steps" in found
    rules = ["algorithm.filter.keep=variance", "algorithm.filter.max_rounds=4"]
    (found,) = continuous(CORRECTED, *rules, "algorithm.filter.oversample=1.5")
    assert "as many groups run as rollout.max_lag allows; use 1" in found
    text = describe_training(load([*CONTINUOUS, CORRECTED]))
    assert "continuous: engines sample while the actor trains" in text
    text = describe_training(load([*CONTINUOUS, "rollout.max_lag=0"]))
    assert "continuous with rollout.max_lag=0: as synchronous" in text


def test_rollout_kv_needs_a_cache_and_a_later_version():
    assert continuous(CORRECTED, "rollout.kv=keep") == []
    (found,) = continuous(CORRECTED, "rollout.kv=keep", "rollout.prefix_caching=false")
    assert "use rollout.prefix_caching=true" in found
    (found,) = continuous("rollout.kv=keep", "rollout.max_lag=0")
    assert "use rollout.kv=recompute" in found
    (found,) = pipelined_problems(CORRECTED, "rollout.kv=keep")
    assert "rollout.kv=keep with rollout.schedule=pipelined" in found
    (found,) = problems(CORRECTED, BUDGET, "rollout.kv=keep")
    assert "rollout.kv=keep with rollout.schedule=carry_over" in found
    text = describe_training(load([*CONTINUOUS, CORRECTED, "rollout.kv=keep"]))
    assert "keys and values of older weights are kept" in text


@pytest.mark.parametrize("schedule", [PIPELINED, CONTINUOUS])
def test_engines_beside_the_actor_need_gpus_of_their_own(schedule):
    shared = [*schedule, CORRECTED, "cluster.device=cuda", "cluster.gpus_per_node=8"]
    with pytest.raises(ConfigError, match=r"set cluster\.placement=separate, or use"):
        check(load(shared), machine=GPU_MACHINE)
    with pytest.raises(ConfigError) as refused:
        check(load([*shared, "cluster.placement=separate"]), machine=GPU_MACHINE)
    assert "rollout.schedule" not in str(refused.value)
