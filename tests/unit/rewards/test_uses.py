import asyncio
import textwrap
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlmath.evaluation.run import sample_and_grade
from rlmath.rewards import RewardError, RewardMix, get_reward
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix_items import MixItem
from rlmath.rewards.openrlhf import OpenRLHFReward
from rlmath.rollout.collect import Collector
from rlmath.types import Problem
from tests.support.http_server import serve
from tests.support.samples import make_sample


def problem(id_):
    return Problem(id_, "", (1,), ("1",))


def sample(id_, text, index=0):
    return make_sample(id_, index, text=text)


class Pool:
    """Answers held-out requests, and then has ``meanwhile`` called."""

    def __init__(self, text, meanwhile=lambda: None):
        self.text, self.meanwhile = text, meanwhile

    def generate(self, requests):
        for one in requests:
            yield sample(one.problem_id, self.text, one.index)
        self.meanwhile()


def evaluate(mix, collector, pool):
    benchmark = SimpleNamespace(
        samples=2, max_response_tokens=4, temperature=1.0, top_p=1.0, tools=False
    )
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
        training.take_finished(block=True)
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


def test_reward_server_metrics():
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


def test_program_run_metrics():
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


FILE = """
    import asyncio

    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        right = ground_truth in solution_str
        if data_source == "plain":
            return float(right)
        return {"score": 1.0 if right else -1.0, "acc": right, "length": len(solution_str)}

    def without_info(data_source, solution_str, ground_truth):
        return len(solution_str)

    def batched(data_sources, solution_strs, ground_truths, extra_infos=None, bonus=0.0):
        assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
        return [bonus + float(t in s) for s, t in zip(solution_strs, ground_truths)]

    def short_batch(data_sources, solution_strs, ground_truths):
        return [1.0]

    async def slow_score(data_source, solution_str, ground_truth, **kwargs):
        await asyncio.sleep(0.02)
        return 2.0

    def no_score(data_source, solution_str, ground_truth):
        return {"acc": 1.0}

    most = 0
    running = 0

    async def custom_rm(args, sample):
        global most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        assert sample.metadata["level"] == 3
        return args.scale * (sample.response.strip() == sample.label) + len(sample.tokens)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "team_scores.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def rows(**columns):
    return {"prompts": ["2+2="] * 2, "answers": [["4"]] * 2, **columns}


def test_compute_score_gets_each_completion_with_its_row(file):
    reward = get_reward(f"{file}:compute_score")
    info = [{"index": 7}, {"index": 8}]
    columns = rows(data_source=["plain", "aime"], extra_info=info)
    assert reward(["it is 4", "5"], **columns) == [1.0, -1.0]
    # All of the mapping but the score.
    assert reward.drain_metrics() == {"acc": 0.0, "length": 1.0}
    seen = reward.function.__globals__["calls"]
    assert seen == [("plain", "it is 4", "4", info[0]), ("aime", "5", "4", info[1])]
    # Without the fields: an empty source, and the row's other fields.
    assert reward(["4"], prompts=["p"], answers=[["4"]], level=[3]) == [1.0]
    assert seen[-1][0] == "" and seen[-1][3]["level"] == 3
    assert get_reward(f"{file}:without_info")(["abc", "d"], **rows()) == [3.0, 1.0]


def test_the_ground_truth_of_a_published_row_is_not_parsed(file):
    reward = get_reward(f"{file}:compute_score")
    published = [{"ground_truth": "\\boxed{4}", "style": "rule"}]
    assert reward(["is \\boxed{4}"], prompts=["p"], answers=[["4"]], reward_model=published) == [1]
    assert reward.function.__globals__["calls"][-1][2] == "\\boxed{4}"


def test_batched_and_async_forms(file):
    assert get_reward(f"{file}:batched")(["4", "5"], **rows()) == [1.0, 0.0]
    assert get_reward(f"{file}:batched", bonus=2.0)(["4", "5"], **rows()) == [3.0, 2.0]
    assert get_reward(f"{file}:slow_score")(["4", "5"], **rows()) == [2.0, 2.0]
    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        get_reward(f"{file}:short_batch")(["4", "5"], **rows())
    with pytest.raises(RewardError, match="no 'score'; it has: acc"):
        get_reward(f"{file}:no_score")(["4"], prompts=["p"], answers=[["4"]])


def test_custom_rm_of_slime_awaits_all_samples_at_once(file):
    reward = get_reward(f"{file}:custom_rm", scale=5.0)
    columns = rows(level=[3, 3], completion_ids=[[1, 2], [3]])
    assert reward([" 4", "5"], **columns) == [7.0, 1.0]
    assert reward.function.__globals__["most"] == 2

    async def inside_a_loop():
        return reward([" 4", "5"], **columns)

    assert asyncio.run(inside_a_loop()) == [7.0, 1.0]


# A field of the data is no reward of the environment.
PROBLEM = Problem("p", "?", (1,), ("2",), {"environment_reward": 9.0})


def grade(*given):
    """Rewards of samples whose environment gave these."""
    names = {"environment": 2.0, "stop_properly": 1.0}
    items = [MixItem(get_reward(name), name, weight) for name, weight in names.items()]
    samples = [
        replace(make_sample("p", i, 3), environment_reward=reward, finish_reason=reason)
        for i, (reward, reason) in enumerate(given)
    ]
    with RewardMix(items) as mix:
        parts = [mix.prescore_group(PROBLEM, [one.model_part()])[0] for one in samples]
        return mix.grade(samples, mix.begin_group(PROBLEM, samples, parts))


def test_the_environments_reward_is_an_item_of_the_sum():
    found = grade((0.5, "stop"), (None, "length"), (1.0, "length"))
    assert [one.rewards["environment"] for one in found] == [0.5, None, 1.0]
    assert [one.reward for one in found] == [1.0, -1.0, 1.0]


def test_samples_of_which_none_has_a_reward(monkeypatch):
    # A field of the data is not the environment's.
    monkeypatch.setitem(PROBLEM.columns, "environment_reward", 9.0)
    found = grade((None, "stop"), (None, "length"))
    assert all(one.rewards["environment"] is None for one in found)
