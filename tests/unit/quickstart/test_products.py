"""Products for the Python tool: its examples are what a rollout makes, and guesses are wrong."""

import json
import random

from rlmath.environments.base import ToolResult
from rlmath.environments.fenced import CLOSING, Fenced
from rlmath.environments.python_tool import PythonTool
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.quickstart import make_products
from rlmath.quickstart.problems import Exercise
from rlmath.quickstart.products import guess, use_tool

EXERCISE = Exercise(473, "*", 862)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_example_with_a_tool_has_the_tokens_of_a_rollout():
    tokenizer = build_tokenizer(2048)
    encode = tokenizer.encode
    text = use_tool(EXERCISE)
    first = text[: text.index(CLOSING) + len(CLOSING)]
    fenced = Fenced(tokenizer, [PythonTool.schema], 64)
    (call,) = fenced.calls(first)
    assert eval(call.arguments["code"]) == EXERCISE.result == 407726
    suffix = fenced.suffix(first, [ToolResult("python", "407726\n", "ok")]).token_ids
    assert [*encode(first), *suffix, *encode("\\boxed{407726}")] == encode(text)


def test_a_guess_has_the_first_and_the_last_digit_of_the_product():
    text = guess(EXERCISE, random.Random(0))
    head, _, guessed = text.partition("=")
    guessed = guessed.partition(".")[0]
    assert head == "473*862" and text.endswith(f" \\boxed{{{guessed}}}")
    assert (len(guessed), guessed[0], guessed[-1]) == (6, "4", "6") and guessed != "407726"


def test_one_example_of_ten_uses_the_tool_and_the_others_are_wrong(tmp_path):
    make_products(tmp_path, seed=1, num_train=300, num_eval=100, num_sft=4000)
    train, held_out, sft = (read(tmp_path / f"{name}.jsonl") for name in ("train", "eval", "sft"))
    assert (len(train), len(held_out), len(sft)) == (300, 100, 4000)
    assert len({row["prompt"] for row in train + held_out + sft}) == 4400
    tool = [row for row in sft if "```" in row["response"]]
    assert 0.08 < len(tool) / len(sft) < 0.12

    def is_right(row):
        left, right = row["prompt"].partition("is ")[2].partition("?")[0].split(" * ")
        return row["response"].endswith(f"\\boxed{{{int(left) * int(right)}}}")

    assert sum(map(is_right, sft)) - len(tool) < 0.01 * len(sft) and all(map(is_right, tool))
    other = tmp_path / "again"
    make_products(other, seed=1, num_train=300, num_eval=100, num_sft=4000)
    assert (other / "sft.jsonl").read_bytes() == (tmp_path / "sft.jsonl").read_bytes()
