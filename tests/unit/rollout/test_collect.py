"""Grading: it keeps no sample when it is done, and the watchdog names what it waits for."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlmath.cluster.watchdog import Stalled, watch_progress
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import MixItem, RewardMix
from rlmath.rollout import watchdog_probes as waiting
from rlmath.rollout.collect import Collector
from rlmath.types import Problem
from tests.support.samples import make_sample


def score(**columns):
    return [float(i % 2) for i in range(len(columns["completions"]))]


class Later(FunctionReward):
    """Answers when its thread has time."""

    def __init__(self, threads):
        super().__init__(score, "later")
        self.is_asynchronous = True
        self._threads = threads

    def submit(self, **columns):
        return self._threads.submit(score, **columns)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graded_samples_go_with_their_groups(asynchronous):
    problems = [Problem(str(i), "?", (1,), ("1",)) for i in range(3)]
    with ThreadPoolExecutor(1) as threads:
        reward = Later(threads) if asynchronous else FunctionReward(score, "now")
        with RewardMix([MixItem(reward, "r")], answer_grader=None) as mix:
            collector = Collector(mix)
            gc.collect()
            gc.disable()
            try:
                samples = [make_sample(one.id, i, text="x") for one in problems for i in range(4)]
                seen = [weakref.ref(one) for one in samples]
                groups = collector.collect(problems, samples, 4).wait()
                assert [one.sample for g in groups for one in g.samples] == samples
                del samples, groups
                collector.begin(4)
                threads.submit(int).result()
                for _ in range(8):  # What each thread did last.
                    collector._threads.submit(int).result()
                assert [one() for one in seen if one() is not None] == []
            finally:
                gc.enable()
                collector.close()


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
            grading.add(make_sample(problem.id, index, text=text))
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


def test_rewards_see_what_the_model_wrote_and_nothing_of_failed_samples():
    seen = []

    def look(completions, completion_ids, **_):
        seen.append((list(completions), [list(ids) for ids in completion_ids]))
        return [float(len(text)) for text in completions]

    turns = (("model", 0), ("observation", 2), ("model", 4))
    samples = [
        make_sample("p", 0, 6, text="abXcd", segments=turns, texts=("ab", "X", "cd")),
        make_sample("p", 1, 3, text="failed", finish_reason="failed", failure="no sandbox"),
        make_sample("p", 2, 2, text="x"),
    ]
    with RewardMix([MixItem(FunctionReward(look, "r"), "r")], answer_grader=None) as mix:
        collector = Collector(mix)
        (group,) = collector.collect([Problem("p", "?", (1,), ("1",))], samples, 3).wait()
        collector.close()
    assert [one.sample for one in group.samples] == samples
    assert [one.reward for one in group.samples] == [4.0, None, 1.0]
    assert group.samples[1].status == "ungraded" and group.samples[1].correct is None
    assert sorted(text for texts, _ in seen for text in texts) == ["abcd", "x"]
    assert [0, 1, 4, 5] in [ids for _, lists in seen for ids in lists]
