"""The driver computes learning rates separately, and must agree with Megatron's scheduler: if
Megatron changes a schedule, healthy runs would be stopped."""

from types import SimpleNamespace

import pytest

from rlmath.actor.optimizer import build_scheduler
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.training.checks.optimizer_steps import scheduled_rate


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("warmup", "decay"), [(0, 7), (3, 7), (5, 2)])
def test_scheduled_rate_is_megatrons(schedule, warmup, decay):
    settings = OptimizerConfig(
        lr=3e-4, min_lr=1e-5, schedule=schedule, warmup_steps=warmup, decay_steps=decay
    )
    group = {"lr": 0.0, "weight_decay": 0.0}
    scheduler = build_scheduler(SimpleNamespace(param_groups=[group]), settings)
    for taken in range(12):
        assert group["lr"] == pytest.approx(scheduled_rate(settings, taken), rel=1e-12, abs=1e-18)
        scheduler.step(1)
