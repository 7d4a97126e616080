"""A drill whose runs take no ranks and no engine: what it plants, when, and what it concludes."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from rlmath.cli import main
from rlmath.commands.drill import catalog, material, runner
from rlmath.commands.drill.fault import Fault
from rlmath.config.schema import AlgorithmConfig, DataConfig
from rlmath.data import load_problems
from rlmath.errors import UserError
from rlmath.model.tiny import tiny_config
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.quickstart.problems import write_rows
from tests.unit.checks.config_cases import write_model_folder


@pytest.fixture
def drill(monkeypatch, tmp_path):
    """Plants faults whose names say how a step takes them. Returns exit code, outcomes, and the
    steps that each run had."""
    planted, begun = [], []

    @contextlib.contextmanager
    def plant(name):
        planted.append(name)
        yield
        planted.remove(name)

    def fault(name, **more):
        return Fault(name, name, "ranks", "", "an alarm", lambda _: plant(name), **more)

    @contextlib.contextmanager
    def run(_, folder, listeners):
        begun.append((folder.name, steps := []))
        if planted == ["raises at the start"]:
            raise UserError("an alarm")

        def step(number):
            steps.append(number)
            assert not planted or planted == [folder.name], "of one fault alone"
            if planted == ["raises"]:
                raise UserError("an alarm")
            if planted == ["warns"]:
                listeners.warning("another warning")
                listeners.warning("an alarm of the detectors")
            if planted == ["raises another"]:
                raise UserError("something else")

        yield SimpleNamespace(step=step)
        assert planted in ([], [folder.name])

    scene = SimpleNamespace(actor=SimpleNamespace(save_checkpoint=lambda folder: None))
    monkeypatch.setattr(runner, "open_training", lambda config: contextlib.nullcontext(scene))
    monkeypatch.setattr(material, "make_model", lambda *_: None)
    monkeypatch.setattr(runner.Drill, "_run", run)

    def outcomes_of(*names, words=("quickstart",), **more):
        monkeypatch.setattr(catalog, "select", lambda only: [fault(one, **more) for one in names])
        file = tmp_path / "outcomes.json"
        code = main(["drill", *words, "--out", str(tmp_path / "out"), "--json", str(file)])
        assert not planted
        return code, json.loads(file.read_text()), dict(begun)

    return outcomes_of


def test_alarms_that_fire_are_told_from_others(drill, capsys):
    code, outcomes, begun = drill("raises", "warns")
    assert code == 0
    assert [one["name"] for one in outcomes] == ["healthy", "raises", "warns"]
    assert all(one["fired"] and not one["skipped"] for one in outcomes)
    assert [one["kind"] for one in outcomes] == ["", "UserError", "warning"]
    assert [one["steps"] for one in outcomes] == [None, 1, 1]
    assert begun == {"healthy": [1, 2, 3, 4], "raises": [1, 2], "warns": [1, 2]}
    assert "2 of 2 alarms fired" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["is silent", "raises another"])
def test_an_alarm_that_does_not_fire_fails_the_drill(drill, capsys, name):
    code, outcomes, begun = drill(name, latest=3)
    assert code == 1
    assert [one["fired"] for one in outcomes] == [True, False]
    assert begun[name] == ([1, 2, 3, 4] if name == "is silent" else [1, 2])
    assert f"no alarm: {name}" in capsys.readouterr().out


def test_a_fault_that_the_settings_cannot_have_is_left_out(drill):
    code, outcomes, begun = drill("raises", missing=lambda config: "there is none")
    assert (code, outcomes[1]["skipped"], outcomes[1]["message"]) == (0, True, "there is none")
    assert list(begun) == ["healthy"]


def test_an_alarm_may_come_before_the_first_step(drill):
    code, outcomes, _ = drill("raises at the start", from_step=1, latest=0)
    assert (code, outcomes[1]["fired"], outcomes[1]["steps"]) == (0, True, 0)


def test_a_configuration_as_it_is(drill, monkeypatch, tmp_path):
    """Nothing is made in the place of the user's model and problems."""
    taken = []
    scene = SimpleNamespace(actor=SimpleNamespace(save_checkpoint=lambda folder: None))
    monkeypatch.setattr(
        runner,
        "open_training",
        lambda config: taken.append(config) or contextlib.nullcontext(scene),
    )
    problems = tmp_path / "problems.jsonl"
    write_rows(problems, material.rows(DataConfig()))
    written = problems.read_bytes()
    model = write_model_folder(tmp_path / "model", tiny_config())
    before = sorted(path.name for path in model.iterdir())
    lengths = "rollout.max_response_tokens=64"
    settings = (f"model.path={model}", f"data.train_paths=[{problems}]", lengths)
    code, outcomes, _ = drill("raises", words=("--as-is", *settings))
    assert (code, outcomes[1]["fired"]) == (0, True)
    assert taken[0].model.path == str(model)
    assert taken[0].algorithm.prompts_per_step == AlgorithmConfig().prompts_per_step
    assert sorted(path.name for path in model.iterdir()) == before
    assert problems.read_bytes() == written


def test_leaked_answers_are_in_prompts_and_in_no_file(tmp_path):
    data, file = DataConfig(), tmp_path / "problems.jsonl"
    write_rows(file, material.rows(data))
    written = file.read_bytes()
    (leak,) = catalog.select("leaked_answers")
    tokenizer = build_tokenizer(2048)
    load_problems([file], data, tokenizer)
    with leak.plant(None), pytest.raises(UserError, match=leak.says):
        load_problems([file], data, tokenizer)
    load_problems([file], data, tokenizer)
    assert file.read_bytes() == written
