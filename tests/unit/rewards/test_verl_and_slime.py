"""Reward functions of verl and slime run unchanged."""

import asyncio
import textwrap

import pytest

from rlmath.rewards import RewardError, RewardMix, get_reward

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
    # Of the mapping, what is not the score.
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


def test_in_a_mix_with_other_rewards(file):
    with RewardMix.from_config([f"{file}:batched", f"{file}:without_info"]) as mix:
        scored = mix.score(["4", "55"], prompts=["2+2="] * 2, answers=[["4"]] * 2)
    assert [one.total for one in scored] == [2.0, 2.0]
