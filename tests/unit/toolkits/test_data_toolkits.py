import json
import subprocess
import sys
from pathlib import Path

import pytest

from hub_sources import SOURCES
from known_texts import KnownTexts
from rlmath.errors import UserError
from toolkits import small_model, word_problems

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
def test_existing_data_is_kept(tmp_path, name):
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


ASDIV = {"body": "Ann has {} pens. She gets 2.", "question": "How many now?", "answer": "{} (pens)"}


def asdiv_row(count):
    row = {name: text.format(count) for name, text in ASDIV.items()}
    return row | {"answer": f"{count + 2} (pens)", "formula": f"{count}+2={count + 2}"}


def write_sets(folder, **sets):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        write(folder / f"{name}.jsonl", rows)


def make_sets(tmp_path):
    target = tmp_path / "made"
    word_problems.main([str(tmp_path / "raw"), "--to", str(target), "--held-out", "2"])
    return {path.stem: read(path) for path in target.iterdir()}


def test_every_problem_is_in_one_place_and_shared_ones_count_once(tmp_path):
    rows = [asdiv_row(count) for count in range(10)]
    shared = {"input": "ann has 3 pens. She gets 2. How many now?", "target": 5.0}
    others = [{"input": f"What is half of {count}?", "target": count / 2} for count in range(5)]
    write_sets(tmp_path / "raw", asdiv=[*rows, rows[0]], mawps=[shared, *others])
    files = make_sets(tmp_path)
    assert {name: len(found) for name, found in files.items()} == {
        "asdiv": 2,
        "mawps": 2,
        "train": 11,
        "worked": 8,
    }
    held_out = {row["prompt"] for name in ("asdiv", "mawps") for row in files[name]}
    assert not held_out & {row["prompt"] for row in [*files["train"], *files["worked"]]}


def test_held_out_rows_do_not_depend_on_row_order(tmp_path):
    found = []
    for name, counts in (("a", range(10)), ("b", reversed(range(10)))):
        write_sets(tmp_path / name / "raw", asdiv=[asdiv_row(count) for count in counts])
        found.append(make_sets(tmp_path / name)["asdiv"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "row", "answer", "worked"),
    [
        ("asdiv", asdiv_row(7), "9", "7 + 2 = 9. The answer is \\boxed{9}."),
        # A formula that does not give the answer is no worked solution.
        ("asdiv", asdiv_row(7) | {"formula": "7+3=10"}, "9", None),
        (
            "svamp",
            {"Body": "B", "Question": "Q?", "Answer": 145.0, "Equation": "( 290.0 / 2.0 )"},
            "145",
            "290 / 2 = 145. The answer is \\boxed{145}.",
        ),
        (
            "svamp",
            {
                "Body": "B.",
                "Question": "Q?",
                "Answer": 3.0,
                "Equation": "( ( 8.0 - 2.0 ) / 2.0 )",
            },
            "3",
            "((8 - 2) / 2) = 3. The answer is \\boxed{3}.",
        ),
        ("mawps", {"input": "Q?", "target": 2.5}, "2.5", None),
        ("gsm8k_test", {"question": "Q?", "answer": "So 7.\n#### 1,234"}, "1234", None),
    ],
)
def test_a_row_of_each_set(name, row, answer, worked):
    problem = word_problems.READERS[name](row)
    assert (problem.answer, problem.worked) == (answer, worked)


@pytest.mark.parametrize("target", [3.8333333333333335, "none", None])
def test_an_answer_that_no_solution_writes_in_the_same_way_is_left_out(tmp_path, target, capsys):
    rows = [{"input": f"Q {count}?", "target": count} for count in range(4)]
    write_sets(tmp_path / "raw", mawps=[*rows, {"input": "Q?", "target": target}])
    assert len(make_sets(tmp_path)["train"]) == 2
    assert "'the answer is no number of at most four decimals': 1" in capsys.readouterr().out


def test_other_fields_and_too_few_problems_are_named(tmp_path):
    write_sets(tmp_path / "raw", svamp=[{"Body": "B", "Question": "Q?"}])
    with pytest.raises(UserError, match=r"svamp\.jsonl.*no field 'Answer'; it has Body, Question"):
        make_sets(tmp_path)
    (tmp_path / "raw" / "svamp.jsonl").unlink()
    write_sets(tmp_path / "raw", mawps=[{"input": "Q?", "target": 1}])
    with pytest.raises(UserError, match="1 different problems are too few to hold out 2"):
        make_sets(tmp_path)
    with pytest.raises(UserError, match="has none of"):
        word_problems.main([str(tmp_path), "--to", str(tmp_path / "x")])


def test_existing_model_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="overwrite"):
        small_model.main([str(tmp_path)])
    assert (tmp_path / "config.json").read_text() == "{}"


def test_unreachable_hub_falls_back_to_package_for_smollm2_only(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(small_model, "fetch_from_hub", lambda name, target: "no network")
    monkeypatch.setattr(small_model, "convert_package", made.append)
    assert small_model.main([str(tmp_path / "a")]) == 0
    assert made == [tmp_path / "a"]
    for arguments in (["--name", "qwen3-0.6b"], ["--from", "hub"]):
        with pytest.raises(UserError, match="no network"):
            small_model.main([str(tmp_path / "b"), *arguments])
    assert made == [tmp_path / "a"]


@pytest.mark.long
def test_package_becomes_model_folder_with_expected_digest(tmp_path):
    """Fetches 94 MB from the package index."""
    from transformers import AutoTokenizer

    # transformers looks for the readers once per process.
    script = [sys.executable, small_model.__file__, str(tmp_path / "model"), "--from", "package"]
    subprocess.run(script, check=True)
    record = json.loads((tmp_path / "model" / small_model.SOURCE_FILE).read_text())
    assert record["digest"] == small_model.PACKAGE_DIGEST
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_a_folder_with_other_files_is_refused_with_exit_2(tmp_path):
    actor = tmp_path / "checkpoints" / "step_000001" / "actor"
    actor.mkdir(parents=True)
    about = {"shape": {"architecture": "Qwen2ForCausalLM"}, "dtype": "float32", "layout": {}}
    (actor / "about.json").write_text(json.dumps(about))
    source, target = tmp_path / "model", tmp_path / "papers"
    for folder in (source, target):
        folder.mkdir()
    (source / "config.json").write_text("{}")
    (target / "thesis.tex").write_text("mine")
    tool = [sys.executable, str(ROOT / "toolkits" / "convert_checkpoint.py"), "to-hf"]
    done = subprocess.run(
        [*tool, str(actor.parent), str(target), f"model.path={source}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "thesis.tex" in done.stderr and "--overwrite" in done.stderr
    assert "Traceback" not in done.stderr
    assert (target / "thesis.tex").read_text() == "mine"
