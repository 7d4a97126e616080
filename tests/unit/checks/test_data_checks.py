"""A check of the data refuses what the loader refuses, and nothing that it accepts."""

import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from config_cases import CPU_MACHINE

from rlmath.checks.run import check
from rlmath.checks.trial import ROWS, trial
from rlmath.config.load import load
from rlmath.data import load_examples, load_problems
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import UserError

GOOD = {"prompt": "What is 1 + 1?", "solutions": "2"}
SKIP = "data.malformed_rows=skip"
CHAT = "data.apply_chat_template=true"


def lines(*rows):
    return b"".join(
        row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
    )


def answer(value):
    return GOOD | {"solutions": value}


def chat(*roles, content="1 + 1?"):
    return GOOD | {"prompt": [{"role": role, "content": content} for role in roles]}


LATIN_1 = '{"prompt": "Été?", "solutions": "2"}\n'.encode("latin-1")
FILES = {
    "an object": ("r.jsonl", lines(answer({"a": 1})), [], False),
    "a truth value": ("r.jsonl", lines(answer(True)), [], False),
    "empty answers": ("r.jsonl", lines(answer(["", None])), [], False),
    "NaN": ("r.jsonl", lines(answer(float("nan"))), [], False),
    "half a surrogate": ("r.jsonl", lines(answer("\ud835")), [], False),
    "a blank prompt": ("r.jsonl", lines(GOOD | {"prompt": " "}), [], False),
    "an assistant's turn last": ("r.jsonl", lines(chat("user", "assistant")), [CHAT], False),
    "parts": ("r.jsonl", lines(chat("user", content=[{"type": "text"}])), [CHAT], False),
    "a chat": ("r.jsonl", lines(chat("system", "user")), [CHAT], True),
    "a message as text": ("r.jsonl", lines(chat("user")), [], True),
    "a chat as text": (
        "r.jsonl",
        lines(chat("system", "user")),
        ["data.apply_chat_template=false"],
        False,
    ),
    "malformed beyond the first": ("r.jsonl", lines(*[GOOD] * 20, answer(None)), [], False),
    "malformed ones first": ("r.jsonl", lines(*[answer(None)] * 9, *[GOOD] * 50), [SKIP], True),
    "all malformed": ("r.jsonl", lines(*[answer(None)] * 9), [SKIP], False),
    "one byte of Latin-1": ("r.jsonl", lines(*[GOOD] * 5, LATIN_1), [SKIP], True),
    "Latin-1": ("r.jsonl", lines(*[GOOD] * 5, LATIN_1), [], False),
    "a BOM before lines": ("r.jsonl", b"\xef\xbb\xbf" + lines(GOOD), [], True),
    "a BOM before a list": ("r.json", b"\xef\xbb\xbf" + json.dumps([GOOD]).encode(), [], True),
    "two lists": ("r.json", json.dumps({"a": [GOOD], "b": []}).encode(), [], False),
    "too long": (
        "r.jsonl",
        lines(GOOD | {"prompt": "x" * 90}),
        ["data.max_prompt_tokens=8"],
        False,
    ),
    "no row": ("r.jsonl", b"\n", [], False),
}


def accepts(act):
    try:
        act()
    except UserError as error:
        return False, str(error)
    return True, ""


def compare(path, overrides, expected, command="train"):
    """Whether ``--check`` and the loader take the file; the check's message."""
    key = {"train": "data.train_paths", "sft": "sft.train_paths", "evaluate": "data.eval_paths"}
    settings = ["model=tiny", "actor=small", "rollout=small", f"runner.run_dir={path.parent}/r"]
    config = load([*settings, *overrides, f"{key[command]}=[{path}]"])
    tokenizer = LightTokenizer("tiny")
    tokenizer.eos_token_id = 0

    def run():
        if command == "sft":
            load_examples([path], config.data, config.sft.response_key, tokenizer)
        else:
            load_problems([path], config.data, tokenizer)

    def look():
        check(config, command, CPU_MACHINE)
        trial(config, command)

    assert accepts(run)[0] is expected
    taken, message = accepts(look)
    assert taken is expected, message
    return message


@pytest.mark.parametrize("name", FILES)
def test_the_check_agrees_with_the_loader(name, tmp_path):
    file, content, overrides, expected = FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    message = compare(path, overrides, expected)
    assert expected or file in message or "max_prompt_tokens" in message


@pytest.mark.parametrize("value", [Decimal("2.5"), float("nan")], ids=str)
def test_numbers_of_parquet_that_are_no_answers(value, tmp_path):
    path = tmp_path / "r.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([answer(value)] * 3), path)
    assert "data.answer_key=solutions: " in compare(path, [], False)


def test_responses_and_held_out_problems_are_read_as_well(tmp_path):
    path = tmp_path / "r.jsonl"
    good = {"prompt": "1 + 1?", "response": "2"}
    path.write_bytes(lines(*[good] * 9, good | {"response": 2}))
    assert "r.jsonl:10" in compare(path, [], False, "sft")
    path.write_bytes(lines(*[GOOD] * 9, answer({})))
    assert "r.jsonl:10" in compare(path, [], False, "evaluate")
    compare(path, [SKIP], True, "evaluate")


def test_malformed_rows_that_are_left_out_are_counted(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines(*[answer(None)] * 2, *[GOOD] * 3))
    overrides = ["model=tiny", f"data.train_paths=[{path}]", f"runner.run_dir={tmp_path}/r", SKIP]
    found = trial(load(overrides), "train")
    assert "2 of 5 checked rows are malformed" in found[0] and "r.jsonl:1" in found[0]
    assert "longest of 3 checked prompts" in found[1]
    # Only the first rows of a long file are read: what comes after them may well be usable.
    path.write_bytes(lines(*[answer(None)] * ROWS, GOOD))
    (line,) = trial(load(overrides), "train")
    assert f"{ROWS:,} of {ROWS:,} checked rows" in line
