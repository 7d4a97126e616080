"""The quickstart's problems, and what it needs of the machine."""

import json
import re

import pytest

from rlmath.checks.machine import Machine
from rlmath.config import arithmetic, load
from rlmath.config.schema import DataConfig, Device, DType
from rlmath.data import load_examples, load_problems, load_tokenizer
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.quickstart import make, make_problems
from rlmath.quickstart.problems import Exercise, all_exercises, work_out
from rlmath.quickstart.run import for_machine

COLUMN = re.compile(r"(\d+)([+-])(\d+)(?:[+-](1))?=(\d+)")


def boxed_number(text):
    return int(re.search(r"\\boxed\{(\d+)\}$", text).group(1))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_worked_example_ends_in_the_result():
    assert work_out(Exercise(47, "+", 38)) == "7+8=15, 4+3+1=8. \\boxed{85}"
    assert work_out(Exercise(83, "-", 47)) == "13-7=6, 8-4-1=3. \\boxed{36}"
    exercises = all_exercises()
    assert len(set(exercises)) == len(exercises) == 8100 + 4095
    assert all(boxed_number(work_out(exercise)) == exercise.result for exercise in exercises)


def test_every_column_of_every_example_is_right_arithmetic_and_a_slip_is_off_by_ten():
    for exercise in all_exercises():
        for slip in (False, True):
            text = work_out(exercise, slip)
            columns = COLUMN.findall(text)
            assert len(columns) == 2, text
            for left, operator, right, carry, value in columns:
                terms = int(right) + int(carry or 0)
                assert int(value) == int(left) + (terms if operator == "+" else -terms), text
        cannot_slip = exercise.operator == "-" and (exercise.left // 10 == exercise.right // 10)
        error = abs(boxed_number(work_out(exercise, slip=True)) - exercise.result)
        assert error == (0 if cannot_slip else 10), exercise


def test_held_out_problems_are_in_no_other_file(tmp_path):
    make_problems(tmp_path, seed=1, num_train=300, num_eval=100, num_sft=400)
    train, held_out, sft = (read(tmp_path / f"{name}.jsonl") for name in ("train", "eval", "sft"))
    assert (len(train), len(held_out), len(sft)) == (300, 100, 400)
    prompts = {row["prompt"] for row in held_out}
    assert len(prompts) == 100
    assert not prompts & {row["prompt"] for row in train + sft}
    assert set(train[0]) == {"prompt", "solutions"} and set(sft[0]) == {"prompt", "response"}


def test_the_seed_decides_every_byte(tmp_path):
    def content(folder, seed):
        make_problems(tmp_path / folder, seed, num_train=50, num_eval=20, num_sft=50)
        return [path.read_bytes() for path in sorted((tmp_path / folder).iterdir())]

    assert content("a", 1) == content("b", 1)
    assert all(one != other for one, other in zip(content("a", 1), content("c", 2), strict=True))


def test_prompts_and_responses_are_short_and_load_without_settings(tmp_path):
    make_problems(tmp_path, num_train=500, num_eval=10, num_sft=500)
    tokenizer = build_tokenizer(2048)
    problems, report = load_problems([tmp_path / "train.jsonl"], DataConfig(), tokenizer)
    assert report.kept == 500 and not report.golds.num_bad and not report.duplicates
    assert max(len(problem.prompt_token_ids) for problem in problems) < 20
    examples, _ = load_examples([tmp_path / "sft.jsonl"], DataConfig(), "response", tokenizer)
    assert max(len(example.response_token_ids) for example in examples) <= 32


def test_the_command_makes_model_and_data(tmp_path, capsys):
    sizes = ["--num-train", "20", "--num-eval", "5", "--num-sft", "30"]
    assert make.main([str(tmp_path), "--seed", "2", *sizes]) == 0
    assert "20 training problems, 5 held out" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "model")
    problems, _ = load_problems([tmp_path / "data" / "eval.jsonl"], DataConfig(), tokenizer)
    assert len(problems) == 5
    with pytest.raises(SystemExit) as caught:
        make.main([str(tmp_path), "--num-train", "99999"])
    assert caught.value.code == 2
    assert "num_train=99999" in capsys.readouterr().err


MEMORY_BYTES = 64 * 2**30


def test_on_a_cpu_nothing_is_changed():
    assert for_machine(Machine(0, "2.13.0+cpu", MEMORY_BYTES), []) == []
    assert for_machine(Machine(1, "2.13.0", MEMORY_BYTES), ["cluster.device=cpu"]) == []


@pytest.mark.parametrize(("gpus", "tp", "dp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_on_gpus_all_are_used(gpus, tp, dp):
    machine = Machine(gpus, "2.13.0", MEMORY_BYTES)
    config = load.load(["experiment=quickstart", *for_machine(machine, [])])
    layout = arithmetic.resolve_layout(config, machine.device(config.cluster.device))
    assert machine.device(config.cluster.device) is Device.cuda
    assert (layout.actor.tensor_parallel, layout.actor.data_parallel) == (tp, dp)
    assert config.model.dtype is DType.bfloat16
