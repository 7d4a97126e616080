"""The watchdog names the grade that a run waits for."""

import time

import numpy as np
import pytest

from rlmath.cluster.watchdog import Stalled, watch_progress
from rlmath.rewards.mix import RewardMix
from rlmath.rollout import watchdog_probes as waiting
from rlmath.rollout.collect import Collector
from rlmath.types import Problem, Sample

# Hangs on one response until a file is there. A function sees all samples of a problem together.
REWARD = """
import pathlib, time
def patient(completions, **columns):
    while "hang" in completions and not pathlib.Path({path!r}).exists():
        time.sleep(0.05)
    return [1.0] * len(completions)
"""


def test_a_grade_that_does_not_come_is_named(tmp_path):
    release, file = tmp_path / "release", tmp_path / "reward.py"
    file.write_text(REWARD.format(path=str(release)))
    problem = Problem("train.jsonl:7", "1 + 1?", (1,), ("2",))
    with RewardMix.from_config([{"name": f"{file}:patient"}]) as rewards:
        collector = Collector(rewards)
        grading = collector.begin(group_size=2)
        grading.expect([problem])
        for index, text in enumerate(("two", "hang")):
            grading.add(
                Sample(
                    problem.id,
                    index,
                    np.array([5]),
                    np.array([-1.0]),
                    text,
                    "stop",
                    ((0, 0),),
                    0,
                    0,
                )
            )
        try:
            with pytest.raises(Stalled) as said, watch_progress(0.5, [waiting.grades(collector)]):
                grading.wait()
        finally:
            release.touch()
            collector.close()
    named = [line for line in str(said.value).splitlines() if line.startswith("  - ")]
    of_problem = "of problem train.jsonl:7"
    assert named == [f"  - the grade of sample {index} {of_problem}" for index in (0, 1)]


class OnABadDisk:
    """A component that cannot say how far it is."""

    def progress(self):
        raise OSError(116, "Stale file handle")

    def waiting_on(self):
        return ["a folder of another node"]

    def processes(self):
        raise OSError(5, "Input/output error")


def test_a_component_that_cannot_say_is_no_progress_and_ends_no_watch(capfd):
    component = OnABadDisk()
    with pytest.raises(Stalled) as said, watch_progress(0.5, [component]):
        time.sleep(20)
    assert "a folder of another node" in str(said.value)
    assert "no stacks: OSError" in capfd.readouterr().err
