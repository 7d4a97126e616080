"""The data tools as commands: what they write, leave out, and say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.data.overlap import KnownTexts, words_of
from rlmath.data.sources import SOURCES

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


def toolkit(name, *arguments):
    return subprocess.run(
        [sys.executable, f"toolkits/{name}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


ROWS = {
    "gsm8k_train": {"question": "Q?", "answer": "so\n#### 7"},
    "math": {"problem": "Q?", "solution": "hence $\\boxed{7}$", "level": "Level 1"},
    "dapo": {
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. The last line of your "
                "response should be of the form Answer: $Answer (without quotes).\n\nQ?\n\n"
                'Remember to put your answer on its own line after "Answer:".',
            }
        ],
        "reward_model": {"ground_truth": "7", "style": "rule"},
    },
    "boba": {"prompt": "<|user|>Q?<|assistant|>", "solutions": ["\\boxed{7}"], "task": "math"},
    "numinamath": {"problem": "Q?", "answer": "7", "question_type": "math-word-problem"},
    "orz": {
        "conversations": [
            {"from": "human", "value": "Q?"},
            {"from": "assistant", "ground_truth": {"value": "7"}},
        ]
    },
    "openr1": {"problem": "Q?", "answer": "7", "solution": "..."},
}


@pytest.mark.parametrize("name", [name for name, s in SOURCES.items() if not s.is_benchmark])
def test_a_row_of_each_training_set(name):
    row = SOURCES[name].convert(ROWS[name])
    assert "Q?" in row["prompt"]
    assert "step by step" not in row["prompt"]
    assert "7" in row["solutions"][0]


def test_options_of_gpqa_are_in_one_order_and_named_right():
    row = {"Question": "Which?", "Correct Answer": "right"} | {
        f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)
    }
    first, again = SOURCES["gpqa_diamond"].convert(row), SOURCES["gpqa_diamond"].convert(row)
    assert first == again
    assert f"{first['answer']}. right" in first["problem"]


def test_prepare_counts_duplicates_and_drops_contradictions(tmp_path):
    file = write(
        tmp_path / "raw.jsonl",
        [
            {"problem": "What is $1+1$?", "answer": "2"},
            {"problem": "What is 1 + 1 ?", "answer": "2"},
            {"problem": "A?", "answer": "1"},
            {"problem": "A?", "answer": "3"},
            {"problem": "B?", "answer": ""},
        ],
    )
    run = toolkit("prepare_data", "openr1", "--from", str(file), "--to", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert read(tmp_path / "openr1.jsonl") == [{"prompt": "What is $1+1$?", "solutions": ["2"]}]
    assert "'the same problem again': 1" in run.stdout
    assert "'no answer': 1" in run.stdout
    wrong = toolkit("prepare_data", "gsm8k", "--from", str(file), "--to", str(tmp_path))
    assert wrong.returncode == 2
    assert "row 1 is not one of openai/gsm8k" in wrong.stderr


def test_prepare_reads_conversations_that_are_bare_lists(tmp_path):
    file = tmp_path / "orz.json"
    file.write_text(json.dumps([ROWS["orz"]["conversations"]]))
    run = toolkit("prepare_data", "orz", "--from", str(file), "--to", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert read(tmp_path / "orz.jsonl") == [{"prompt": "Q?", "solutions": ["7"]}]


LONG = "Every morning Aya goes for a 9-kilometer-long walk and stops at a coffee shop afterwards."


def test_words_are_the_same_for_two_writings():
    assert words_of("Find $\\dfrac{1}{2}$.") == words_of("find \\frac{1}{2}")
    assert words_of("$x+1$") != words_of("$x-1$")


def test_overlap_of_long_and_short_problems():
    known = KnownTexts()
    known.add("aime:1", LONG)
    known.add("short:1", "Compute $17 \\times 23 + 4$.")
    known.add("tiny:1", "What is love")
    assert known.find(f"Now: {LONG.upper()} Find the time.").source == "aime:1"
    assert known.find("Every morning Aya goes for a swim in the sea.") is None
    assert known.find("First, compute 17 \\times 23 + 4, then add one to what you found.")
    assert known.find("Compute $17 \\times 23 - 4$ please, and then say what you found.") is None
    assert known.find("Aya goes for a 9") is not None  # Five words, all in a known problem.
    assert known.find("what is love?") is not None
    assert known.find("what is love and what is it for, one may ask oneself") is None


def test_decontaminate(tmp_path):
    bench = write(tmp_path / "bench.jsonl", [{"problem": LONG, "answer": "204"}])
    train = write(
        tmp_path / "train.jsonl",
        [
            {"prompt": f"{LONG} How long?", "solutions": ["1"]},
            {"prompt": "Ben has three apples and eats two of them. How many?", "solutions": ["1"]},
        ],
    )
    out = tmp_path / "clean.jsonl"
    run = toolkit("decontaminate", str(train), "--against", str(bench), "--to", str(out))
    assert run.returncode == 0, run.stderr
    assert [row["prompt"][:3] for row in read(out)] == ["Ben"]
    (reason,) = read(tmp_path / "clean.left_out.jsonl")
    assert reason["left_out"] == "train.jsonl:1"
    assert reason["as"] == "bench.jsonl:1"
    words = [str(train), "--against", str(bench), "--to", str(out)]
    bad = toolkit("decontaminate", *words, "--overwrite", "data.prompt_key=text")
    assert bad.returncode == 2
    assert "its fields are prompt, solutions" in bad.stderr


@pytest.mark.parametrize("name", ["prepare_data", "decontaminate", "filter_by_pass_rate"])
def test_what_is_there_already_is_kept(tmp_path, name):
    """And said before anything is read, sampled or fetched: none of these files is there."""
    mine = tmp_path / "dapo.jsonl"
    mine.write_text("mine")
    words = {
        "prepare_data": ("dapo", "--to", str(tmp_path)),
        "decontaminate": ("no.jsonl", "--against", "none.jsonl", "--to", str(mine)),
        "filter_by_pass_rate": ("no.jsonl", "--to", str(mine)),
    }[name]
    run = toolkit(name, *words)
    assert run.returncode == 2
    assert f"--to: {mine} is there already" in run.stderr and "--overwrite" in run.stderr
    assert mine.read_text() == "mine"


def test_files_of_another_kind_are_not_written_to(tmp_path):
    (tmp_path / "a.left_out.jsonl").mkdir()
    words = ("no.jsonl", "--against", "none.jsonl", "--to", str(tmp_path / "a.jsonl"))
    run = toolkit("decontaminate", *words, "--overwrite")
    assert run.returncode == 2 and "is a folder" in run.stderr


def test_pass_rates_count_what_was_judged(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "toolkits"))
    from filter_by_pass_rate import pass_rates

    rows = [
        {"problem_id": "f:1", "status": "correct", "correct": True},
        {"problem_id": "f:1", "status": "wrong", "correct": False},
        {"problem_id": "f:1", "status": "timeout", "correct": None},
        {"problem_id": "f:2", "status": "no_answer", "correct": False},
        {"problem_id": "f:3", "status": "error", "correct": None},
    ]
    write(tmp_path / "eval_000000.jsonl", rows)
    assert pass_rates(tmp_path) == {"f:1": 0.5, "f:2": 0.0}
