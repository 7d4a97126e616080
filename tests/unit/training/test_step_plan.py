from types import SimpleNamespace

import pytest

from rlmath.actor.plan import StepPlan
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.load import load
from rlmath.training.algorithm_settings import reference_kind, reference_share
from rlmath.training.controllers import Coefficients
from rlmath.training.plan import complete, plan_step

GIVEN = ["model.path=tiny", "runner.run_dir=r"]
ONE = "algorithm.minibatches_per_step=1"


def passes(step, *overrides):
    return plan_step(load([*GIVEN, *overrides]), step)


def test_the_first_step_and_every_nth_have_a_gate():
    gates = [step for step in range(1, 12) if passes(step, "alignment.every=5").gate]
    assert gates == [1, 5, 10]
    assert not passes(1, "alignment.every=0").gate


def test_the_first_gate_is_before_the_first_update():
    assert passes(1, ONE).passes == ("old",)
    assert passes(2, ONE).passes == ()
    assert passes(1, ONE, "alignment.every=0").passes == ()


def test_a_reference_pass_needs_a_kl_term():
    assert "reference" not in passes(1).passes
    assert "reference" in passes(1, "algorithm.kl_coef=0.1").passes


def test_the_policy_waits_while_the_value_model_warms_up():
    gae = ["algorithm.advantage=gae", "value.warmup_steps=2"]
    steps = [passes(step, *gae) for step in (1, 2, 3)]
    assert [one.policy for one in steps] == [False, False, True]
    assert all(one.values for one in steps)
    assert passes(1).policy and not passes(1).values


def test_old_log_probs_are_computed_only_when_something_needs_them():
    def needs(*overrides):
        return needs_old_log_probs(load([*GIVEN, *overrides]).algorithm)

    assert needs() and not needs(ONE)
    assert needs(ONE, "algorithm.correction.kind=auto")
    assert needs(ONE, "algorithm.correction.veto_below=1e-4")
    assert needs(ONE, "algorithm.entropy_top_share=0.2", "algorithm.old_log_probs=engine")
    assert needs(ONE, "algorithm.entropy_target=1")
    assert needs(ONE, "algorithm.kl_in=reward")
    assert not needs("algorithm.old_log_probs=engine", "algorithm.kl_in=reward")
    settings = load([*GIVEN, "algorithm.correction.kind=token_mask", "algorithm.correction.high=4"])
    assert settings.algorithm.correction.bounds() == (0.5, 4.0)


def config_of(*overrides):
    given = [f"algorithm.{text}" for text in overrides]
    return load(["model.path=m", "runner.run_dir=r", *given])


def test_without_targets_they_are_the_settings():
    algorithm = config_of("kl_coef=0.1", "entropy_coef=0.02").algorithm
    weights = Coefficients(algorithm)
    assert weights.entropy_coef_at(None) == 0.02
    weights.update_kl(9.0, samples=100)
    assert weights.kl_coef == 0.1 and weights.state_dict() == {}
    weights.load_state_dict({"kl_coef": 0.7})  # Of a run that steered it; this one does not.
    assert weights.kl_coef == 0.1


def test_kl_coef_is_steered_to_its_target():
    algorithm = config_of("kl_coef=0.1", "kl_target=0.01", "kl_horizon_samples=1000").algorithm
    weights = Coefficients(algorithm)
    weights.update_kl(0.011, samples=500)  # 10 % over it, over half the horizon: 5 % more.
    assert weights.kl_coef == pytest.approx(0.105)
    weights.update_kl(float("nan"), samples=500)
    weights.update_kl(None, samples=500)
    assert weights.kl_coef == pytest.approx(0.105)
    again = Coefficients(algorithm)
    again.load_state_dict(weights.state_dict())
    assert again.kl_coef == weights.kl_coef


def test_entropy_coef_acts_below_its_target_only():
    algorithm = config_of(
        "entropy_target=0.2", "entropy_coef=0.01", "entropy_coef_step=0.005"
    ).algorithm
    weights = Coefficients(algorithm)
    assert weights.entropy_coef_at(0.1) == 0.01
    assert weights.entropy_coef_at(0.1) == pytest.approx(0.015)
    assert weights.entropy_coef_at(0.3) == 0.0  # Above the target: no bonus, and a lower weight.
    assert weights.entropy_coef_at(float("nan")) == pytest.approx(0.015)
    again = Coefficients(algorithm)
    again.load_state_dict(weights.state_dict())
    assert again.entropy_coef_at(0.1) == pytest.approx(0.015)


def test_the_entropy_coef_stands_still_while_the_value_model_is_trained_alone():
    weights = Coefficients(config_of("entropy_target=0.2", "entropy_coef=0.01").algorithm)
    alignment = SimpleNamespace(entropy=0.1)
    monitor = None
    for step in (1, 2):
        plan = complete(StepPlan(policy=False), alignment, weights, monitor, step)
        assert plan.objective.entropy_coef == 0.01 == weights.entropy_coef
    assert complete(StepPlan(), alignment, weights, monitor, 3).objective.entropy_coef == 0.01
    assert weights.entropy_coef > 0.01


def test_a_kl_in_the_reward_is_no_term_of_the_loss():
    in_loss, in_reward = config_of("kl_coef=0.1"), config_of("kl_coef=0.1", "kl_in=reward")
    assert plan_step(in_loss, 1, 0.3).objective.kl_coef == 0.3
    assert plan_step(in_reward, 1, 0.3).objective.kl_coef == 0.0


def test_reference_kinds_and_shares():
    assert reference_kind(config_of()) == "none"  # None is held at kl_coef=0.
    assert reference_kind(config_of("kl_coef=0.1")) == "frozen"
    reset = config_of("kl_coef=0.1", "reference.kind=reset", "reference.every=3")
    assert [reference_share(reset.algorithm, step) for step in (0, 1, 2, 3, 6)] == [0, 0, 0, 1, 1]
    averaged = ("kl_coef=0.1", "reference.kind=averaged", "reference.decay=0.75")
    assert reference_share(config_of(*averaged).algorithm, 5) == 0.25
    every = config_of(*averaged, "reference.every=2").algorithm
    assert [reference_share(every, step) for step in (4, 5)] == [0.25, 0.0]
    assert reference_share(config_of("kl_coef=0.1").algorithm, 5) == 0.0
