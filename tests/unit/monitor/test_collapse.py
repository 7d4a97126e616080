"""Each detector on series made for it: where it fires, where not, and what then happens."""

import math
import random

import pytest

from rlmath.config.collapse import DETECTORS, CollapseAction, CollapseConfig
from rlmath.monitor.collapse import Collapsed, CollapseDetectors, RollBack, act
from rlmath.monitor.repetition import compression_ratio, repeated_ngrams, repetition

RNG = random.Random(5)
# A run in which nothing is wrong: every metric noisy around a healthy value, rewards rising.
HEALTHY = [
    {
        "step": step,
        "rollout/repetitive_share": RNG.uniform(0.0, 0.1),
        "rewards/total/none_share": 0.1,
        "grading/failed_share": RNG.uniform(0.0, 0.05),
        "rewards/sandbox_timeout_share": RNG.uniform(0.1, 0.6),
        "rollout/truncated_share": RNG.uniform(0.1, 0.4),
        "rollout/truncated_groups_share": RNG.uniform(0.0, 0.2),
        "train/entropy_loss": 0.5 * math.exp(-step / 150) + RNG.uniform(0.0, 0.1),
        "rollout/response_length": 2000 + 10 * step + RNG.gauss(0, 200),
        "rollout/equal_reward_groups_share": RNG.uniform(0.2, 0.6),
        "mismatch/k3": RNG.uniform(0.0005, 0.01),
        "mismatch/effective_sample_size": RNG.uniform(0.9, 1.0),
        "train/grad_norm": math.exp(RNG.gauss(-1, 0.5)),
        "rollout/rewards": -2.0 + 0.02 * step + RNG.gauss(0, 0.3),
    }
    for step in range(1, 201)
]
# Collapses from step 101 on: metric, and its value N steps later.
COLLAPSES = {
    "repetition": ("rollout/repetitive_share", lambda k: 0.35 + 0.1 * k),
    "unscored": ("rewards/total/none_share", lambda k: 1.0),
    "grading_failed": ("grading/failed_share", lambda k: 0.6),
    "sandbox_timeouts": ("rewards/sandbox_timeout_share", lambda k: 1.0),
    "truncated": ("rollout/truncated_share", lambda k: 0.75 + 0.05 * k),
    "truncated_groups": ("rollout/truncated_groups_share", lambda k: 0.6),
    "entropy_low": ("train/entropy_loss", lambda k: 0.009 / (k + 1)),
    "entropy_high": ("train/entropy_loss", lambda k: 2.5 + k),
    "length_drift": ("rollout/response_length", lambda k: 480 - 10 * k),
    "equal_rewards": ("rollout/equal_reward_groups_share", lambda k: 0.97),
    "mismatch_k3": ("mismatch/k3", lambda k: 0.2 * (k + 1)),
    "mismatch_ess": ("mismatch/effective_sample_size", lambda k: 0.25 / (k + 1)),
    "grad_norm": ("train/grad_norm", lambda k: 30.0 * (k + 1)),
    "reward_fall": ("rollout/rewards", lambda k: -4.0),
}


def alarms_of(lines, config=None):
    detectors = CollapseDetectors(config or CollapseConfig())
    return [alarm for line in lines for alarm in detectors.update(line["step"], line)]


def test_samples_without_a_reward_stop_a_run_by_default():
    lines = [{"step": step, "rewards/total/none_share": 0.9} for step in range(1, 4)]
    alarms = alarms_of(lines)
    with pytest.raises(Collapsed, match=r"unscored.*rewards/total/none_share is 0\.9"):
        act(alarms, lambda *_: None, lambda *_: None)


def test_no_alarm_in_a_healthy_run():
    assert alarms_of(HEALTHY) == []


def test_every_detector_has_a_series_here():
    assert {*COLLAPSES, "sharpening"} == set(DETECTORS)


@pytest.mark.parametrize("name", COLLAPSES)
def test_collapse_is_detected_in_time_and_once(name):
    metric, value = COLLAPSES[name]
    lines = [
        {**line, metric: value(line["step"] - 101)} if line["step"] > 100 else line
        for line in HEALTHY
    ]
    (alarm,) = alarms_of(lines)
    assert alarm.detector == name
    # A mean over five steps needs one more step to be sure.
    late = 3 if name == "reward_fall" else 0
    assert 101 <= alarm.onset <= 101 + late
    assert alarm.step == alarm.onset + 2
    assert metric in alarm.reason
    assert f"collapse.{name}=" in alarm.reason


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_value_that_is_not_a_number_counts_as_collapse(name):
    metric, _ = COLLAPSES[name]
    lines = [{**line, metric: None} if line["step"] > 100 else line for line in HEALTHY]
    same_metric = {other for other, (m, _) in COLLAPSES.items() if m == metric}
    assert {alarm.detector for alarm in alarms_of(lines)} == same_metric


def test_two_steps_are_not_three_and_a_second_streak_fires_again():
    def series(bad):
        share = [0.9 if step in bad else 0.1 for step in range(1, 31)]
        return [{"step": i, "rollout/truncated_share": s} for i, s in enumerate(share, start=1)]

    assert alarms_of(series({4, 5, 7, 8, 10})) == []
    found = alarms_of(series({4, 5, 6, 7, 8, 20, 21, 22}))
    assert [(alarm.onset, alarm.step) for alarm in found] == [(4, 6), (20, 22)]


def evaluated_lines(accuracies, entropy):
    """60 steps with an evaluation before the first and after each tenth; each ± 0.01."""
    lines = [{"step": step} for step in range(61)]
    for line in lines[1:]:
        line["train/entropy_loss"] = entropy(line["step"])
    for line, accuracy in zip(lines[::10], accuracies, strict=True):
        line |= {"eval/accuracy": accuracy, "eval/accuracy_standard_error": 0.01}
    return lines


def test_sharpening_without_learning_alarms_once_at_the_second_evaluation():
    lines = evaluated_lines(
        [0.20, 0.21, 0.19, 0.20, 0.21, 0.20, 0.20], lambda step: 0.3 * 0.96**step
    )
    # 0.96^25 = 0.36: after 30 steps the last five have less than half of the entropy of the first.
    (alarm,) = alarms_of(lines)
    assert (alarm.detector, alarm.onset, alarm.step) == ("sharpening", 30, 40)
    assert "held-out accuracy stayed at 0.200 ± 0.010 (0.210 ± 0.010 now)" in alarm.reason
    # The same after a resume that saw half of them.
    detectors = CollapseDetectors(CollapseConfig(), lines[:25])
    later = [alarm for line in lines[25:] for alarm in detectors.update(line["step"], line)]
    assert [(alarm.onset, alarm.step) for alarm in later] == [(30, 40)]


@pytest.mark.parametrize(
    ("accuracies", "entropy"),
    [
        ([0.20, 0.21, 0.23, 0.24, 0.26, 0.28, 0.30], lambda step: 0.3 * 0.96**step),
        ([0.20, 0.20, 0.20, 0.20, 0.20, 0.20, 0.20], lambda step: 0.3),
        # Below once, and above again.
        ([0.20, 0.25, 0.21, 0.25, 0.21, 0.25, 0.25], lambda step: 0.3 * 0.96**step),
        ([0.20, None, None, None, None, None, 0.20], lambda step: 0.3 * 0.96**step),
    ],
    ids=["accuracy rises", "entropy stays", "never twice in a row", "one evaluation"],
)
def test_no_sharpening_alarm_when(accuracies, entropy):
    assert alarms_of(evaluated_lines(accuracies, entropy)) == []


def test_a_resumed_run_sees_what_came_before():
    metric, value = COLLAPSES["length_drift"]
    lines = [
        {**line, metric: value(line["step"] - 101)} if line["step"] > 100 else line
        for line in HEALTHY
    ]
    # Broken off after the streak's second step.
    detectors = CollapseDetectors(CollapseConfig(), lines[:102])
    (alarm,) = detectors.update(103, lines[102])
    assert (alarm.onset, alarm.step) == (101, 103)


@pytest.mark.parametrize("action", CollapseAction)
def test_collapse_actions(action):
    config = CollapseConfig(action=action)
    lines = [{"step": i, "rollout/truncated_share": 0.9} for i in range(1, 4)]
    alarms = alarms_of(lines, config)
    notes, warnings = [], []

    def do():
        act(alarms, lambda *note: notes.append(note), warnings.append)

    if action is CollapseAction.stop:
        with pytest.raises(Collapsed, match=r"since step 1 rollout/truncated_share is 0\.9"):
            do()
    elif action is CollapseAction.rollback:
        with pytest.raises(RollBack) as caught:
            do()
        assert (caught.value.onset, caught.value.step) == (1, 3)
    else:
        do()
    assert [note[:3] for note in notes] == [(3, "collapse.truncated", action.value)]
    assert bool(warnings) == (action is not CollapseAction.log)


def test_a_threshold_of_null_turns_a_detector_off():
    lines = [{"step": i, "rollout/truncated_share": 1.0} for i in range(1, 9)]
    assert alarms_of(lines, CollapseConfig(truncated=None)) == []


def test_repetition():
    proof = (
        "Let $x$ be the number of apples. Then $3x + 5 = 20$, so $x = 5$. We check: three times "
        "five is fifteen, and five more make twenty, as the problem says. Next, the area of the "
        "triangle with sides 13, 14 and 15 follows from Heron's formula with $s = 21$, which "
        "gives $\\sqrt{21 \\cdot 8 \\cdot 7 \\cdot 6} = 84$. The sum of both is $\\boxed{89}$."
    )
    loop = "Wait, let me check this again. " * 60
    assert compression_ratio(proof) < 3
    assert compression_ratio(loop) > 15
    assert compression_ratio("no no no no") == 1.0
    assert not repetition(proof, list(proof.encode())).is_repetitive
    assert repetition(loop, []).is_repetitive
    assert repetition("", [1, 2, 3] * 100).is_repetitive
    assert not repetition("", [1, 2, 3] * 20).is_repetitive
    # 10 tokens have three 8-grams; a period of 1 makes two of them repeats.
    assert repeated_ngrams([7] * 10) == pytest.approx(2 / 3)
    assert repeated_ngrams([7] * 7) == 0.0
