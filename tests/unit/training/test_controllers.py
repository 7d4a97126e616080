"""Weights of KL and entropy follow what they are told, and continue after a resume."""

from types import SimpleNamespace

import pytest

from rlmath.actor.plan import StepPlan
from rlmath.config.load import load
from rlmath.training.algorithm_settings import reference_settings, reference_share
from rlmath.training.controllers import Coefficients
from rlmath.training.plan import complete, plan_step


def config_of(*overrides):
    given = [f"algorithm.{text}" for text in overrides]
    return load(["model.path=m", "runner.run_dir=r", *given])


def test_without_targets_they_are_the_settings():
    algorithm = config_of("kl_coef=0.1", "entropy_coef=0.02").algorithm
    weights = Coefficients(algorithm)
    assert weights.entropy_coef_at(None) == 0.02
    weights.see_kl(9.0, samples=100)
    assert weights.kl_coef == 0.1 and weights.state_dict() == {}
    weights.load_state_dict({"kl_coef": 0.7})  # Of a run that steered it; this one does not.
    assert weights.kl_coef == 0.1


def test_kl_coef_is_steered_to_its_target():
    algorithm = config_of("kl_coef=0.1", "kl_target=0.01", "kl_horizon_samples=1000").algorithm
    weights = Coefficients(algorithm)
    weights.see_kl(0.011, samples=500)  # 10 % over it, over half the horizon: 5 % more.
    assert weights.kl_coef == pytest.approx(0.105)
    weights.see_kl(float("nan"), samples=500)
    weights.see_kl(None, samples=500)
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


def test_the_reference():
    assert reference_settings(config_of()).kind == "none"  # None is held at kl_coef=0.
    assert reference_settings(config_of("kl_coef=0.1")).kind == "frozen"
    reset = config_of("kl_coef=0.1", "reference.kind=reset", "reference.every=3")
    assert [reference_share(reset.algorithm, step) for step in (1, 2, 3, 6)] == [0, 0, 1, 1]
    averaged = config_of("kl_coef=0.1", "reference.kind=averaged", "reference.decay=0.75")
    assert reference_share(averaged.algorithm, 5) == 0.25
    assert reference_share(config_of("kl_coef=0.1").algorithm, 5) == 0.0
