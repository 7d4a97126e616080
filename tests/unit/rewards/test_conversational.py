"""Reward functions for TRL's conversational data, on problems that a chat template renders."""

import json
import textwrap

import numpy as np
import pytest

from rlmath.config.load import load
from rlmath.data import load_problems
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.rewards.mix import RewardMix
from rlmath.types import Sample

# In the form of the GRPO notebooks: the question is the last message's content.
FUNCTIONS = """
    import re

    asked = []

    def correctness(prompts, completions, answer, **kwargs):
        question = prompts[0][-1]["content"]
        assert prompts[0][-1]["role"] == "user" and all(m[-1] for m in prompts)
        asked.append((question, [m["role"] for m in prompts[0]]))
        responses = [completion[0]["content"] for completion in completions]
        found = [re.findall(r"<answer>(.*?)</answer>", response) for response in responses]
        prompts[0].append(completions[0][0])
        return [2.0 if f and f[-1] == a else 0.0 for f, a in zip(found, answer)]

    def continued(prompts, completions, **kwargs):
        return [float(len(prompt + completion)) for prompt, completion in zip(prompts, completions)]

    def plain(prompts, completions, **kwargs):
        return [float(prompt.endswith("<|assistant|>")) for prompt in prompts]
"""
CHAT = [{"role": "system", "content": "Old."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "notebook.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def problem(tmp_path, prompt, *overrides):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "2"}))
    data = load(["runner.run_dir=r", "model=tiny", "data.answer_key=answer", *overrides]).data
    tokenizer = LightTokenizer("tiny")
    return load_problems([path], data, tokenizer)[0][0]


def samples(*texts):
    ids, log_probs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    return [
        Sample("p", index, ids, log_probs, text, "stop", ((0, 1),), index, 0)
        for index, text in enumerate(texts)
    ]


def values(mix, one, label):
    found = mix.score_group(one, samples("<answer>2</answer>", "<answer>3</answer>"))
    return [sample.rewards[label] for sample in found]


CHATS = ["data.apply_chat_template=true"]
SYSTEM = [*CHATS, "data.system_prompt=New.", "data.prompt_template='Solve: {prompt}'"]


@pytest.mark.parametrize(
    ("prompt", "overrides", "question", "roles"),
    [
        ("1+1?", CHATS, "1+1?", ["user"]),
        (CHAT, CHATS, "1+1?", ["system", "user"]),
        (CHAT, SYSTEM, "Solve: 1+1?", ["system", "user"]),
        ("1+1?", SYSTEM, "Solve: 1+1?", ["system", "user"]),
        ("1+1?", [], "1+1?", ["user"]),  # Chat by the item's completion_format alone.
    ],
)
def test_a_notebooks_reward_reads_the_question(
    prompt, overrides, question, roles, functions, tmp_path
):
    one = problem(tmp_path, prompt, *overrides)
    names = [f"{functions}:correctness", f"{functions}:continued"]
    with RewardMix.from_config(names, completion_format="chat") as mix:
        for _ in range(2):  # What a function does to its messages is its own.
            assert values(mix, one, "correctness") == [2.0, 0.0]
            assert values(mix, one, "continued") == [len(roles) + 1] * 2
        asked = mix.items[0].reward.function.__globals__["asked"]
    assert asked == [(question, roles)] * 4


def test_functions_for_text_and_other_rewards_get_the_rendered_prompt(functions, tmp_path):
    one = problem(tmp_path, CHAT, *CHATS)
    with RewardMix.from_config([f"{functions}:plain"], completion_format="text") as mix:
        assert values(mix, one, "plain") == [1.0, 1.0]
    assert one.messages == tuple(CHAT)
    assert problem(tmp_path, "1+1?").messages is None


def test_messages_of_a_call_by_hand_stay_as_they_are(functions):
    with RewardMix.from_config([f"{functions}:correctness"], completion_format="chat") as mix:
        (scored,) = mix.score(["<answer>2</answer>"], prompts=[CHAT], answer=["2"])
    assert scored.total == 2.0 and len(CHAT) == 2
