"""Is a run learning, is it healthy, how long still: as the report and ``rlmath watch`` say it."""

import json
import math

import pytest

from rlmath.commands.report.answers import BAD, GOOD, OPEN, answers
from rlmath.commands.report.events import Event
from rlmath.config.load import load, save
from rlmath.monitor import MetricsWriter
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.run_settings import ATTEMPTS_FILE
from rlmath.utils.run_lock import LOCK_FILE, only_run_in


def answers_of(folder, lines, *events):
    save(
        load(["model.path=tiny", f"runner.run_dir={folder}", "runner.steps=40"]),
        folder / "config.yaml",
    )
    with MetricsWriter(folder) as writer:
        for step, line in lines.items():
            writer.write(step, {"rollout/rewards": 0.0, **line})
    run = RunFolder(folder)
    for line in run.metrics:
        line["time_s"] = 1000.0 + 30 * line["step"]
    return answers(run, events)


def accuracy(value, error=0.03):
    return {"eval/accuracy": value, "eval/accuracy_standard_error": error}


@pytest.mark.parametrize(
    ("lines", "mood", "verdict"),
    [
        ({0: accuracy(0.5), 9: accuracy(0.7)}, GOOD, "held-out accuracy rose by 0.2 ± 0.042"),
        ({0: accuracy(0.5), 9: accuracy(0.55)}, OPEN, "changed by +0.05 ± 0.042"),
        ({0: accuracy(0.5), 9: accuracy(0.3)}, BAD, "held-out accuracy fell by 0.2"),
        ({0: accuracy(0.5), 9: {}}, OPEN, "not known"),
        ({0: accuracy(0.5, math.nan), 9: accuracy(0.9, math.nan)}, OPEN, "not known"),
        ({n: {"rollout/rewards": n / 2} for n in range(4)}, OPEN, "not known"),
        ({n: {"rollout/rewards": float(n)} for n in range(20)}, GOOD, "mean reward rose by 10 ±"),
        ({n: {"rollout/rewards": 1.0} for n in range(20)}, OPEN, "mean reward changed by +0"),
    ],
)
def test_learning_is_a_change_beyond_its_error(tmp_path, lines, mood, verdict):
    learning = answers_of(tmp_path, lines)[0]
    assert learning.mood == mood and verdict in learning.verdict


def test_learning_shows_the_windows_that_it_compares(tmp_path):
    lines = {n: {"rollout/rewards": 1.0 if n < 10 else -1.0} for n in range(1, 20)}
    lines[1] = {"rollout/rewards": -5.0}
    learning = answers_of(tmp_path, {**lines, 20: {**accuracy(0.5), "rollout/rewards": 9.0}})[0]
    assert learning.mood == OPEN
    assert learning.detail == "0.2 (steps 1 to 10) → 0 (steps 11 to 20)"


def test_health_is_no_alarm(tmp_path):
    lines = {1: {"alignment/mean_exp_abs_diff": 1.0002, "rollout/truncated_share": 0.25}}
    kept = Event(1, "checkpoint", "checkpoint step_000001")
    health = answers_of(tmp_path, lines, kept)[1]
    assert (health.mood, health.verdict) == (GOOD, "no alarm")
    assert "1.000200" in health.detail and "25.0 %" in health.detail
    alarms = [Event(1, "warning", "a"), Event(2, "warning", "b"), kept]
    health = answers_of(tmp_path, lines, *alarms)[1]
    assert (health.mood, health.verdict) == (BAD, "warning: 2")
    assert health.detail == "the last, at step 2: b"


def test_a_running_run_says_how_long_still(tmp_path):
    lines = {n: {"timing/step": 20.0, "rollout/response_tokens": 50.0} for n in range(1, 11)}
    with only_run_in(tmp_path):
        time = answers_of(tmp_path, lines)[2]
    assert (time.mood, time.verdict) == (OPEN, "running: step 10 of 40")
    assert time.detail == "3:20 of steps, 500 response tokens; 15:00 left at 30 s a step"
    assert answers_of(tmp_path, lines)[2].mood == BAD  # Nobody runs it.
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere\n")
    time = answers_of(tmp_path, lines)[2]
    assert (time.mood, "running on elsewhere" in time.verdict) == (OPEN, True)


def test_pace_is_without_pauses_and_first_steps(tmp_path):
    answers_of(tmp_path, {n: {} for n in range(7)})
    for after in (0, 3):
        line = {"config": "config.yaml", "after_step": after, "begins": not after}
        with (tmp_path / ATTEMPTS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
    run = RunFolder(tmp_path)
    for line, at in zip(run.metrics, (0, 500, 510, 520, 90_000, 90_010, 90_020), strict=True):
        line["time_s"] = float(at)
    assert run.pace_s() == 10 and run.pace_s(2) is None
