"""Each detector on the metrics of real runs that were made to collapse.

``collapsed/`` has the figures that detectors look at. All runs but the last are of ``rlmath train
experiment=quickstart``, 8 prompts x 4 samples a step, a constant learning rate
(``actor.optimizer.lr``), no SFT before:

* ``length``: rewarded for the length of responses; 5e-3, ``algorithm.filter.keep=variance
  algorithm.filter.oversample=2``.
* ``brevity``: rewarded for short responses; 5e-3.
* ``one_token``: rewarded for saying one token again and again, up to 288; 2e-2, 4 prompts x 8.
* ``learning_rate``: the math reward after SFT; 2e-4, and from step 15 on 25 times that.
* ``stale_samples``: rewarded for letters; 1e-2, with groups left over from the step before, as in
  ``length``.
* ``lost_judge``: a reward that returns None for every sample from step 5 on, as a judge does that
  has gone away; the preset's learning rate.
* ``sharpening``: SmolLM2-135M on word problems, the second run of ``docs/records/real_model.md``.
"""

import json
from pathlib import Path

import pytest

from rlmath.config.collapse import DETECTORS, CollapseConfig
from rlmath.monitor.collapse import CollapseDetectors

RUNS = Path(__file__).parent / "collapsed"
# Run, detector, its settings where they are not the defaults; the first bad step, and the step at
# which the detector is sure. Runs that collapse within ten steps have a shorter beginning.
AT_ONCE = {"patience_steps": 1, "baseline_steps": 5}
SEEN = [
    ("length", "truncated", {}, 2, 4),
    ("length", "truncated_groups", {}, 2, 4),
    ("length", "equal_rewards", {}, 5, 7),
    ("one_token", "repetition", {}, 21, 23),
    ("one_token", "entropy_low", {}, 31, 33),
    ("learning_rate", "entropy_high", {}, 17, 19),
    ("learning_rate", "reward_fall", {}, 20, 22),
    ("brevity", "length_drift", AT_ONCE, 6, 6),
    ("brevity", "grad_norm", AT_ONCE, 17, 17),
    # Every second step has samples of older weights.
    ("stale_samples", "mismatch_k3", AT_ONCE, 2, 2),
    ("stale_samples", "mismatch_ess", AT_ONCE, 2, 2),
    ("lost_judge", "unscored", {}, 5, 7),
    # Two evaluations, after 20 and 40 steps; by then the entropy has fallen by 1.5 and 2.2.
    ("sharpening", "sharpening", {"sharpening": 1.4}, 20, 40),
]


def lines_of(run):
    return [json.loads(line) for line in (RUNS / f"{run}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("run", "detector", "settings", "onset", "step"), SEEN)
def test_real_collapse_is_detected(run, detector, settings, onset, step):
    detectors = CollapseDetectors(CollapseConfig(**settings))
    alarms = [alarm for line in lines_of(run) for alarm in detectors.update(line["step"], line)]
    first = next(alarm for alarm in alarms if alarm.detector == detector)
    assert (first.onset, first.step) == (onset, step)


# ``rlmath drill`` plants these in a run.
PLANTED = {"grading_failed", "sandbox_timeouts"}


def test_each_detector_has_a_real_run():
    assert {detector for _, detector, *_ in SEEN} == set(DETECTORS) - PLANTED


def test_the_steps_before_a_collapse_are_quiet():
    detectors = CollapseDetectors(CollapseConfig())
    healthy = [line for line in lines_of("learning_rate") if line["step"] <= 14]
    assert not [alarm for line in healthy for alarm in detectors.update(line["step"], line)]
