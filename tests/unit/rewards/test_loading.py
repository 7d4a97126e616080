"""Rewards that others wrote for TRL, Open-R1 and OpenRLHF run unchanged."""

import asyncio
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from rlmath.rewards import RewardError, RewardMix, RewardSettingError, available_rewards, get_reward
from rlmath.rewards import registry as reward_registry

TRL_FILE = """
    import asyncio, re

    def format_reward(completions, **kwargs):
        pattern = r"^<think>.*?</think>$"
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(pattern, c) else 0.0 for c in contents]

    def solution_length(completions, solution, **kwargs):
        return [float(len(s)) for s in solution]

    def plain(completions, prompts):                 # no **kwargs
        return [len(c) + len(p) for c, p in zip(completions, prompts)]

    def by_tokens(completion_ids, **kwargs):         # no completions
        return [-len(ids) for ids in completion_ids]

    def some(completions, **kwargs):
        return [None, float("nan"), float("inf"), True][: len(completions)]

    def scaled(completions, factor=1.0, **kwargs):
        return [factor * len(c) for c in completions]

    async def slow(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [float(len(c)) for c in completions]

    class Judge:
        def __init__(self, bonus=0.0):
            self.bonus = bonus
        def __call__(self, completions, **kwargs):
            return [self.bonus + 1.0 for _ in completions]

    class AsyncJudge:
        async def __call__(self, completions, **kwargs):
            return [2.0 for _ in completions]

    ready = Judge(bonus=5.0)

    def make_constant(value):
        def constant(completions, **kwargs):
            return [value] * len(completions)
        return constant

    def short(completions, **kwargs):
        return [1.0]

    def words(completions, **kwargs):
        return ["good"] * len(completions)

    def raises(completions, **kwargs):
        return [1 / 0 for _ in completions]

    not_callable = 3
"""


@pytest.fixture
def trl_file(tmp_path):
    path = tmp_path / "team_rewards.py"
    path.write_text(textwrap.dedent(TRL_FILE))
    return path


def test_by_file_path(trl_file):
    chats = [[{"role": "assistant", "content": t}] for t in ("<think>a</think>", "b")]
    assert get_reward(f"{trl_file}:format_reward")(chats) == [1.0, 0.0]
    assert get_reward(f"{trl_file}:solution_length")(["x"], solution=["abc"], extra=[1]) == [3.0]
    assert get_reward(f"{trl_file}:plain")(["ab"], prompts=["c"], completion_ids=[[1]]) == [3.0]
    assert get_reward(f"{trl_file}:by_tokens")(["ab"], completion_ids=[[1, 2]]) == [-2.0]
    assert get_reward(f"{trl_file}:by_tokens")([[1, 2, 3]]) == [-3.0]
    assert get_reward(f"{trl_file}:solution_length")(["x"], ["abc"]) == [3.0]
    assert get_reward(f"{trl_file}:plain")(["ab"], ["cd"]) == [4.0]
    with pytest.raises(RewardSettingError, match="3 arguments by position; it takes 2"):
        get_reward(f"{trl_file}:plain")(["ab"], ["cd"], ["ef"])
    assert get_reward(f"{trl_file}:some")(["a"] * 4) == [None, None, None, 1.0]
    assert get_reward(f"{trl_file}:scaled", factor=2.0)(["abc"]) == [6.0]
    assert get_reward(f"{trl_file}:ready")(["abc"]) == [6.0]
    assert get_reward(f"{trl_file}:Judge", bonus=1.0)(["abc"]) == [2.0]
    assert get_reward(f"{trl_file}:make_constant", value=0.25)(["a", "b"]) == [0.25, 0.25]


def test_by_import_path(trl_file, monkeypatch):
    monkeypatch.syspath_prepend(str(trl_file.parent))
    try:
        assert get_reward("team_rewards:scaled", factor=3.0)(["ab"]) == [6.0]
        assert get_reward("team_rewards.scaled")(["ab"]) == [2.0]
        with pytest.raises(RewardSettingError, match="no 'scale'; it has: format_reward"):
            get_reward("team_rewards:scale")
    finally:
        sys.modules.pop("team_rewards", None)


def test_async_rewards(trl_file):
    for name, expected in (("slow", [2.0, 1.0]), ("AsyncJudge", [2.0, 2.0])):
        reward = get_reward(f"{trl_file}:{name}")
        assert reward(["ab", "c"]) == expected

        async def inside_a_loop(reward=reward):
            return reward(["ab", "c"])

        assert asyncio.run(inside_a_loop()) == expected


def test_async_rewards_share_one_loop(tmp_path):
    # A session or a lock made in one call is bound to its loop and must still work in the next.
    path = tmp_path / "session.py"
    path.write_text(
        "import asyncio\nlock = None\n"
        "async def reward(completions, **kwargs):\n"
        "    global lock\n"
        "    lock = lock or asyncio.Lock()\n"
        "    async with lock:\n"
        "        await asyncio.sleep(0.02)\n"
        "    return [1.0] * len(completions)\n"
    )
    reward = get_reward(str(path))
    results = []
    threads = [threading.Thread(target=lambda: results.append(reward(["a"]))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert results == [[1.0]] * 4


def test_async_rewards_after_a_fork(trl_file):
    reward = get_reward(f"{trl_file}:slow")
    assert reward(["ab"]) == [2.0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if reward(["abc"]) == [3.0] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_rewards_that_break_the_contract_are_named(trl_file):
    with pytest.raises(RewardError, match="reward short: returned 1 values for 2 completions"):
        get_reward(f"{trl_file}:short")(["a", "b"])
    with pytest.raises(RewardError, match="returned 'good', which is neither a number nor None"):
        get_reward(f"{trl_file}:words")(["a"])
    with pytest.raises(RewardSettingError, match="wants the column"):
        get_reward(f"{trl_file}:solution_length")(["a"])
    with pytest.raises(RewardSettingError, match="int and cannot be called"):
        get_reward(f"{trl_file}:not_callable")


def test_parameters_that_a_function_does_not_take(tmp_path):
    path = tmp_path / "strict.py"
    path.write_text("def strict(completions, factor=1):\n    return [factor] * len(completions)\n")
    with pytest.raises(RewardSettingError, match="no parameter factr; it has: completions, factor"):
        get_reward(f"{path}:strict", factr=1)
    assert get_reward(str(path), factor=4)(["a"]) == [4.0], "the only function needs no name"


def test_paths_that_lead_nowhere(tmp_path, trl_file):
    with pytest.raises(RewardSettingError, match="no such file"):
        get_reward(str(tmp_path / "missing.py") + ":f")
    with pytest.raises(RewardSettingError, match="no module 'no_such_pkg"):
        get_reward("no_such_pkg.mod:f")
    with pytest.raises(RewardSettingError, match="which of its functions"):
        get_reward(str(trl_file))
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package_here\n")
    with pytest.raises(RewardSettingError, match="ModuleNotFoundError while loading it") as caught:
        get_reward(str(broken))
    assert "PYTHONPATH" not in str(caught.value)
    # A script could import it.
    (tmp_path / "no_such_package_here.py").write_text("")
    with pytest.raises(RewardSettingError, match=f"PYTHONPATH={tmp_path}"):
        get_reward(str(broken))


def test_dataclasses_in_a_reward_file(tmp_path):
    path = tmp_path / "with_dataclass.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Point:\n    x: int = 1\n"
        "def reward(completions, **kwargs):\n    return [Point().x for _ in completions]\n"
    )
    assert get_reward(str(path))(["a"]) == [1.0]


OPENRLHF_FILE = """
    import torch

    def helper(x):
        return x

    def reward_func(queries, prompts, labels, **kwargs):
        assert all(q.startswith(p) for q, p in zip(queries, prompts))
        answers = [q[len(p):] for q, p in zip(queries, prompts)]
        rewards = torch.tensor([float(label in a) for a, label in zip(answers, labels)])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"found": rewards, "n": 3}}
"""


def test_openrlhf_file(tmp_path):
    path = tmp_path / "reward_func.py"
    path.write_text(textwrap.dedent(OPENRLHF_FILE))
    reward = get_reward(str(path))
    assert reward(["it is 4", "5"], prompts=["2+2?"] * 2, answers=[["4"], ["4"]]) == [1.0, 0.0]
    assert reward.drain_metrics() == {"scores": 0.5, "found": 0.5, "n": 3.0}
    assert reward.drain_metrics() == {}
    chats = [[{"role": "user", "content": "2+2?"}]]
    assert reward([[{"role": "assistant", "content": "4"}]], prompts=chats, solution=["4"]) == [1.0]
    with RewardMix.from_config([str(path)]) as mix:
        scored = mix.score(["4"], prompts=["2+2?"], answers=[["4"]])
        assert scored[0].total == 1.0
        assert mix.metrics()["rewards/reward_func/found"] == 1.0


def test_openrlhf_reply_without_rewards(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'scores': [1.0]}\n")
    with pytest.raises(RewardError, match="no 'rewards'; it has: scores"):
        get_reward(str(path))(["a"], solution=["a"])


def test_trl_own_rewards_run_here(monkeypatch):
    # Where launchers/test.sh puts it, apart from the packages of a run.
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "trl"))
    pytest.importorskip("trl", reason="TRL is not installed; bash launchers/test.sh fetches it")
    think = get_reward("trl.rewards:think_format_reward")
    chats = [[{"content": "<think>\na\n</think>\nb"}], [{"content": "b"}]]
    assert think(chats) == [1.0, 0.0]
    overlong = get_reward(
        "trl.rewards:get_soft_overlong_punishment", max_completion_len=100, soft_punish_cache=20
    )
    assert overlong(["x"], completion_ids=[[1] * 90]) == [-0.5]
    assert overlong.__name__ == "soft_overlong_punishment_reward"
    ours = get_reward("soft_overlong_punishment", max_completion_len=100, soft_punish_cache=20)
    for n in (0, 79, 80, 81, 99, 100, 101):
        assert ours(completion_ids=[[1] * n]) == overlong(["x"], completion_ids=[[1] * n])
    repeated = get_reward("trl.rewards:get_repetition_penalty_reward", ngram_size=2)
    assert repeated(["x"], completion_ids=[[5] * 5]) == [-0.75]


def test_every_built_in_name_has_its_class():
    for name in available_rewards():
        assert callable(reward_registry.reward_class(name))
    assert set(available_rewards()) >= {
        "accuracy", "format", "tag_count", "reasoning_steps", "length", "cosine",
        "repetition_penalty", "soft_overlong_punishment", "stop_properly", "code", "binary_code",
        "code_format", "ioi_code", "cf_code", "math",
    }  # fmt: skip
