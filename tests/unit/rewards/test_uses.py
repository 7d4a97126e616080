"""Figures of training's groups and of held-out samples stay apart, whenever either is graded."""

import threading
from types import SimpleNamespace

import numpy as np
from servers import serve

from rlmath.evaluation.run import sample_and_grade
from rlmath.rewards import RewardMix
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix_items import MixItem
from rlmath.rewards.openrlhf import OpenRLHFReward
from rlmath.rollout.collect import Collector
from rlmath.types import Problem, Sample


def problem(id_):
    return Problem(id_, "", (1,), ("1",))


def sample(id_, text, index=0):
    tokens = np.array([1], np.int32)
    return Sample(id_, index, tokens, np.zeros(1, np.float32), text, "stop", ((0, 0),), 0, 0)


class Pool:
    """Answers held-out requests, and then has ``meanwhile`` called."""

    def __init__(self, text, meanwhile=lambda: None):
        self.text, self.meanwhile = text, meanwhile

    def generate(self, requests):
        for one in requests:
            yield sample(one.problem_id, self.text, one.index)
        self.meanwhile()


def evaluate(mix, collector, pool):
    benchmark = SimpleNamespace(samples=2, max_response_tokens=4, temperature=1.0, top_p=1.0)
    held_out = SimpleNamespace(benchmark=benchmark, problems=(problem("held_out"),))
    sampling = SimpleNamespace(pool=pool, rewards=mix, collector=collector)
    return sample_and_grade(sampling, 1, held_out, 1)


def test_groups_that_are_graded_before_and_during_an_evaluation_are_in_the_figures():
    may_grade, notes = threading.Event(), []

    def value(completions, log_metric, **_):
        if "slow" in completions:
            assert may_grade.wait(10)
        for text in completions:
            log_metric("length", len(text))
        notes.append(list(completions))
        return [{"first": 1.0, "slow": 3.0, "held": 100.0}[text] for text in completions]

    value.thread_safe = True
    with RewardMix([MixItem(FunctionReward(value, "value"), "value")]) as mix:
        collector = Collector(mix, 2)
        training = collector.begin(2)
        training.expect([problem("before"), problem("during")])
        training.add(sample("before", "first"))
        training.add(sample("before", "first", 1))
        training.finished(block=True)
        training.add(sample("during", "slow"))
        training.add(sample("during", "slow", 1))
        (group,) = evaluate(mix, collector, Pool("held", may_grade.set))
        assert [one.reward for one in group.samples] == [100.0, 100.0]
        training.wait()
        found = mix.metrics()
        assert found["rewards/total/mean"] == found["rewards/value/mean"] == 2.0
        assert found["rewards/value/length"] == 4.5
        assert ["held", "held"] in notes
        assert mix.metrics() == {}
        collector.close()


def test_a_servers_figures():
    def lengths(exchange):
        queries = exchange.body["query"]
        logs = {"length": [float(len(one)) for one in queries]}
        exchange.reply({"rewards": [1.0] * len(queries), "extra_logs": logs})

    with serve(lengths) as server:
        params = {"urls": server.url, "batch_size": 4, "batch_window_s": 30.0}
        with RewardMix.from_config([{"name": "remote", "params": params}]) as mix:
            # Both wait for a call that they would share.
            pieces = mix.prescore(["aa"], prompts=[""])
            held = mix.for_evaluation().prescore(["bbbb"] * 3, prompts=[""] * 3)
            mix.totals(pieces)
            mix.totals(held)
            found = mix.metrics()
            assert found["rewards/remote/calls"] == 1.0
            assert found["rewards/remote/length"] == 2.0
            other = mix.for_evaluation().metrics()
            assert other["rewards/remote/calls"] == 1.0
            assert other["rewards/remote/length"] == 4.0
            assert mix.metrics()["rewards/remote/calls"] == 0.0


def test_figures_that_openrlhfs_replies_carry():
    def reply(queries, prompts, labels):
        return {"rewards": [1.0] * len(queries), "extra_logs": {"length": [len(queries[0])]}}

    with RewardMix([MixItem(OpenRLHFReward(reply), "own")]) as mix:
        mix.score(["aa"], prompts=[""])
        mix.for_evaluation().score(["bbbb"], prompts=[""])
        assert mix.for_evaluation().metrics()["rewards/own/length"] == 4.0
        assert mix.metrics()["rewards/own/length"] == 2.0


def test_runs_of_programs():
    """They run in threads of the reward, which do not know who asked."""
    tests = [{"type": "stdin_stdout", "input": "", "output": "1\n"}]
    info = {"language": "python", "test_cases": tests}
    text = "```python\nprint(1)\n```"
    with RewardMix.from_config(["code"]) as mix:
        (scored,) = mix.for_evaluation().score([text], verification_info=[info])
        assert scored.total == 1.0
        mix.score([text] * 2, verification_info=[info] * 2)
        unknown = {"language": "cobol", "test_cases": tests}
        mix.score(["```cobol\nx\n```"], verification_info=[unknown])
        found = mix.metrics()
        assert found["rewards/code/sandbox_runs"] == 2.0
        assert found["rewards/code/provider_errors"] == 1.0
        other = mix.for_evaluation().metrics()
        assert other["rewards/code/sandbox_runs"] == 1.0
        assert other["rewards/code/provider_errors"] == 0.0
