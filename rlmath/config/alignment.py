"""Settings of ``alignment``: the check of trainer-engine log-prob agreement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmath.utils.setting import setting

OnMisalignment = StrEnum("OnMisalignment", ["stop", "warn"])


@dataclass
class AlignmentConfig:
    every: int = setting(
        1,
        "Check trainer-engine log-prob agreement before the first update and every N steps; 0: "
        "measure only, never fail.",
        least=0,
    )
    # At least 1: a mean of exp of something that is not negative.
    max_mean_exp_abs_diff: float | None = setting(
        None,
        "Maximum mean of exp|logp_actor - logp_engine|. null: from the model itself: at most twice "
        "as far from 1, and the largest difference at most three times as large, as rounding every "
        "activation of the actor otherwise makes them.",
        least=1,
    )
    on_fail: OnMisalignment = setting(
        OnMisalignment.stop,
        "If that limit is exceeded or an invariant of the update is violated (ratio 1, KL 0): stop "
        "the run, or warn and continue.",
    )
