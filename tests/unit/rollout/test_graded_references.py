"""What grading has done with keeps no sample: its arrays would stay in an engine's object store."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import MixItem, RewardMix
from rlmath.rollout.collect import Collector
from rlmath.types import Problem, Sample


def made(problem, index):
    arrays = np.arange(4, dtype=np.int32), np.zeros(4, np.float32)
    return Sample(problem, index, *arrays, "x", "stop", ((0, 0),), index, 0)


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
                samples = [made(one.id, i) for one in problems for i in range(4)]
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
