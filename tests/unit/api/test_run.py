"""A run from Python without its ranks and engines: what opens, closes and continues it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmath import Run, api
from rlmath.api import run as run_module
from rlmath.errors import UserError
from rlmath.quickstart import EXPERIMENTS
from rlmath.training import loop

ROWS = [{"prompt": f"{i}+1?", "solutions": [str(i + 1)]} for i in range(40)]


class Loop:
    def __init__(self):
        self.opened: list[tuple[str, str]] = []
        self.closed: list[str] = []
        self.done = 0
        self.fails: BaseException | None = None

    def steps(self, config):
        self.opened.append((config.runner.run_dir, config.runner.resume))
        self.done = 0 if config.runner.resume == "never" else self.done
        training = SimpleNamespace(done=self.done)
        try:
            yield from self.between(training, loop.Opened(training))
            while self.done < 3:
                if self.fails is not None:
                    error, self.fails = self.fails, None
                    raise error
                self.done += 1
                metrics = {"rollout/accuracy": self.done / 3}
                yield from self.between(training, loop.StepDone(self.done, metrics, ()))
            yield from self.between(training, loop.Finished())
            self.closed.append("at its end")
        except GeneratorExit:
            self.closed.append("early")
            raise

    def between(self, training, event):
        ask = yield event
        while ask is not None:
            ask = yield loop.Answer(ask(training))


@pytest.fixture
def the_loop(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = Loop()
    monkeypatch.setattr(loop, "steps", made.steps)
    yield made
    run_module._close_all()


def run_of(*overrides, folder="run", **given):
    return Run.from_config(
        "experiment=gsm8k_smoke",
        "data.prompt_key=prompt",
        "data.answer_key=solutions",
        f"runner.run_dir={folder}",
        *overrides,
        **{"data": ROWS, **given},
    )


def test_a_loop_that_was_left_continues(the_loop):
    run = run_of()
    assert the_loop.opened == []
    for step in run:
        assert isinstance(step, api.Step) and step.number == 1
        assert step.metrics["rollout/accuracy"] == pytest.approx(1 / 3) and step.groups == ()
        break
    assert [step.number for step in run] == [2, 3]
    assert list(run) == [] and len(the_loop.opened) == 1
    run.close()
    assert the_loop.closed == ["at its end"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a rank failed")])
def test_interrupted_run_is_closed_and_resumes(the_loop, error, capsys):
    run = run_of("runner.resume=never")
    handler = signal.getsignal(signal.SIGTERM)
    next(run)
    the_loop.fails = error
    with pytest.raises(type(error)):
        next(run)
    assert run_module._open == []
    assert "continue the run with: rlmath train experiment=gsm8k_smoke" in capsys.readouterr().out
    assert run.command.endswith(" 'data.train_paths=[run/given/data.jsonl]' runner.resume=auto")
    # Whatever the settings said: it is this run that continues.
    assert [step.number for step in run] == [2, 3]
    assert the_loop.opened == [("run", "never"), ("run", "auto")]
    run.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_error_of_the_callers_loop_leaves_the_run_open_for_the_next_one(the_loop):
    first = run_of()
    with pytest.raises(ZeroDivisionError):
        for _ in first:
            1 / 0  # noqa: B018
    assert the_loop.closed == []
    with run_of(folder="other") as second:
        next(second)
        assert the_loop.closed == ["early"], "a process has one run at a time"
        assert "closed" in repr(first) and "open" in repr(second)
    assert the_loop.closed == ["early", "early"]


def test_questions_between_steps_open_the_run_and_their_mistakes_do_not_close_it(the_loop):
    run = run_of()

    def ask(training):
        if training.done == 0:
            raise UserError("not yet")
        return 7

    with pytest.raises(UserError, match="not yet"):
        run._ask(ask)
    assert the_loop.closed == [] and run.number == 0
    next(run)
    the_loop.done = 1
    assert run._ask(lambda _: "it") == "it"
    assert [step.number for step in run] == [2, 3]
    assert run._ask(lambda _: "after the end") == "after the end"


def test_benchmarks_are_checked_before_the_run_is_opened(the_loop):
    run = run_of()
    with pytest.raises(UserError, match=r"aime42.*known are aime24"):
        run.evaluate("aime42")
    with pytest.raises(UserError, match=r"sample_count.*max_response_tokens"):
        run.evaluate("aime24", sample_count=3)
    with pytest.raises(UserError, match=r"name a benchmark"):
        run.evaluate()
    with pytest.raises(UserError, match="run folder"):
        run.save("run")
    assert the_loop.opened == []


def test_rows_with_other_keys_are_named_before_anything_starts(tmp_path, the_loop):
    rows = [{"question": "1+1?", "answer": "2"}] * 40
    with pytest.raises(
        UserError, match=r"data.prompt_key=prompt: run/given/data.jsonl:1.*question"
    ):
        run_of(data=rows)
    assert not (tmp_path / "run" / "given" / "data.jsonl").exists()


def test_an_argument_that_is_none_is_named(the_loop):
    with pytest.raises(UserError, match=r"no argument los; parts are loss"):
        run_of(los=len)
    with pytest.raises(UserError, match=r"algorithm.loss=json:dumps.*not registered"):
        run_of(loss=json.dumps)


def test_a_changed_function_is_refused_and_the_old_file_stays(the_loop):
    namespace = {"__name__": "__main__"}
    exec("def mine(completions, **_): return [0.0] * len(completions)", namespace)
    run = run_of("runner.resume=auto", rewards=[namespace["mine"]])
    folder = Path("run/checkpoints/step_000001")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    from rlmath.checks import attempts

    attempts.record(run._config, 0)
    before = Path("run/given/mine.py").read_bytes()
    run_of("runner.resume=auto", rewards=[namespace["mine"]])
    exec("def mine(completions, **_): return [1.0] * len(completions)", namespace)
    with pytest.raises(UserError, match=r"plugin_hashes.run/given/mine.py: \w+ -> \w+"):
        run_of("runner.resume=auto", rewards=[namespace["mine"]])
    assert Path("run/given/mine.py").read_bytes() == before
    accepted = "runner.accept_changes=[plugin_hashes]"
    run_of("runner.resume=auto", accepted, rewards=[namespace["mine"]])
    assert Path("run/given/mine.py").read_bytes() != before


def test_the_settings_are_those_of_the_command_line(the_loop):
    run = run_of(rewards=[("math", 2.0)], eval_data=ROWS[:2], advantage="rloo")
    assert run._config.data.eval_paths == ["run/given/eval_data.jsonl"]
    assert run._config.algorithm.advantage == "rloo"
    assert [(one.name, one.weight) for one in run._config.reward.items] == [("math", 2.0)]
    assert len(Path("run/given/eval_data.jsonl").read_text().splitlines()) == 2
    assert json.loads(Path("run/given/data.jsonl").read_text().splitlines()[0]) == ROWS[0]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_quickstart_begins_with_its_warm_start(the_loop, monkeypatch, experiment):
    from rlmath.model.tiny import make_tiny_model
    from rlmath.quickstart import run as quickstart

    made = []

    def warm_start(config, machine):
        made.append(config.runner.run_dir)
        return make_tiny_model(Path(config.runner.run_dir) / "sft")

    monkeypatch.setattr(quickstart, "warm_start", warm_start)
    settings = [experiment, "runner.run_dir=q", "cluster.device=cpu"]
    for _ in range(2):  # Once: the second run takes it.
        run = Run.from_config(*settings, data=ROWS, eval_data=ROWS)
        assert run._config.model.path == "q/sft" and " model.path=q/sft " in run.command
        assert made == ["q"]
    make_tiny_model(Path("other"))
    other = Run.from_config(*settings, "model.path=other", data=ROWS, eval_data=ROWS)
    assert other._config.model.path == "other"
