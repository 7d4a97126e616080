"""Learning rates as the driver works them out, and what it says about the ranks' findings."""

from types import SimpleNamespace

import pytest

from rlmath.actor.step_probe import OTHER_SLOPE, OTHER_WEIGHT, StepFinding
from rlmath.config.load import load
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.optimizer_steps import (
    OptimizerSteps,
    scheduled_rate,
    wrong_rates,
    wrong_steps,
)

COSINE = OptimizerConfig(
    lr=1.0, min_lr=0.1, schedule=Schedule.cosine, warmup_steps=4, decay_steps=12
)


def test_scheduled_rate_warms_up_and_decays():
    rates = [scheduled_rate(COSINE, n) for n in (0, 2, 4, 8, 12, 30)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])
    constant = OptimizerConfig(lr=0.3)
    assert [scheduled_rate(constant, n) for n in (0, 100)] == [0.3, 0.3]


def test_rates_of_a_schedule_that_began_again_are_named():
    healthy = [{"lr": scheduled_rate(COSINE, n), "discarded": 0.0} for n in (5, 6)]
    assert wrong_rates(COSINE, 5, healthy) == []
    again = [{"lr": scheduled_rate(COSINE, n), "discarded": 0.0} for n in (0, 1)]
    first, second = wrong_rates(COSINE, 5, again)
    assert "minibatch 0 has a learning rate of 0" in first and "began again" in second
    # One that was discarded takes no step of the schedule.
    kept = [{"lr": scheduled_rate(COSINE, 5), "discarded": one} for one in (1.0, 0.0)]
    assert wrong_rates(COSINE, 5, kept) == []


def test_findings_of_ranks_are_named_with_numbers():
    (sentence,) = wrong_steps([(0, StepFinding()), (3, StepFinding(6.0, 3e-5, 1e-5))])
    assert "minibatch 1, rank 3" in sentence and "it is 3e-05, and should be 1e-05" in sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [OTHER_SLOPE, OTHER_WEIGHT])
def test_a_slope_in_bfloat16_is_a_warning_and_all_else_an_error(dtype, kind):
    config, said = load(["experiment=quickstart", f"model.dtype={dtype}"]), []
    findings = ((0, StepFinding()), (1, StepFinding(kind, 1.0, 2.0, "attention")))
    minibatches = [{"lr": 0.0, "discarded": 1.0}] * 2
    result = SimpleNamespace(step_findings=findings, minibatches=minibatches, schedule_steps=0)
    monitor = SimpleNamespace(warn=said.append)
    now = SimpleNamespace(
        run=SimpleNamespace(config=config),
        report=SimpleNamespace(values=None),
        result=result,
        step=3,
        monitor=monitor,
    )
    if (dtype, kind) == ("bfloat16", OTHER_SLOPE):
        OptimizerSteps().after_update(now)
        assert "step 3: minibatch 1, rank 1, attention" in said[0]
    else:
        with pytest.raises(InvariantError, match="minibatch 1, rank 1, attention"):
            OptimizerSteps().after_update(now)
        assert said == []
