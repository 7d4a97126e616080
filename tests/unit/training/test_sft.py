"""Supervised fine-tuning ends when its steps do nothing."""

import pytest

from rlmath.errors import UserError
from rlmath.training.sft import DiscardedSteps


def test_steps_in_a_row_that_change_no_weight_end_the_run():
    seen = DiscardedSteps()
    for step, reason in enumerate(["", "nan", "nan", "", "nan", "nan"], start=1):
        seen.see(step, reason)
    with pytest.raises(
        UserError, match=r"steps 5 to 7 changed no weight: loss = nan.*optimizer.lr"
    ):
        seen.see(7, "loss = nan")


def test_from_the_first_step_on_the_model_is_suspected():
    seen = DiscardedSteps()
    seen.see(1, "x")
    seen.see(2, "x")
    with pytest.raises(UserError, match=r"steps 1 to 3 changed no weight.*model.path"):
        seen.see(3, "x")
