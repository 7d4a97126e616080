"""How a run ends: at its last step, on a signal, and with the time of grace that it has."""

import dataclasses
import json
import os
import shlex
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from rlmath.checks.attempts import ATTEMPTS_FILE
from rlmath.cli import main
from rlmath.config.load import load
from rlmath.model.parallel import Layout
from rlmath.model.tiny import make_tiny_model
from rlmath.monitor import MetricsWriter, read_summary
from rlmath.monitor.startup import StartLog
from rlmath.training.grace import Grace
from rlmath.training.loop import curves_if_interrupted
from rlmath.training.metrics import rollout_metrics
from rlmath.training.summary import ending, summarize
from rlmath.utils.ending_signals import ENDING_SIGNALS, ending_by_exit, signals_wait
from tests.support.samples import make_group, make_sample


def steps(run_dir, count=3):
    with MetricsWriter(run_dir) as writer:
        writer.write(0, {"eval/accuracy": 0.25, "eval/accuracy_standard_error": 0.03})
        for step in range(1, count + 1):
            writer.write(
                step,
                {
                    "eval/accuracy": 0.25 + step / 10,
                    "eval/accuracy_standard_error": 0.02,
                    "rollout/response_tokens": 500.0,
                    "timing/step": 1200.0,
                },
            )


def test_the_end_of_a_run_says_what_it_came_to_and_what_is_next(tmp_path, capsys):
    run_dir = tmp_path / "run"
    rows = tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"Question": "1+1?", "answer": "2"}) + "\n")
    config = load(
        [
            f"model.path={run_dir / 'hf'}",
            "model.dtype=float32",
            f"runner.run_dir={run_dir}",
            f"data.eval_paths=[{rows}]",
            "data.prompt_key=Question",
            "data.answer_key=answer",
            "data.max_prompt_tokens=64",
            r'data.prompt_template="{prompt} Say \"so\" in \boxed{}."',
            "data.malformed_rows=skip",
            "eval.temperature=0.3",
            "reward.fallback=number",
            "rollout.max_response_tokens=64",
        ]
    )
    steps(run_dir)
    layout = SimpleNamespace(actor=Layout(2, data_parallel=4), engines=8, accelerators=8)
    session = SimpleNamespace(layout=layout)
    text = ending(config, summarize(config, session, {}))
    assert "3 steps: trained on 1,500 response tokens; 1:00:00 of steps = 8.0 GPU-hours" in text
    assert "0.250 ± 0.030 before, 0.550 ± 0.020 after" in text
    for name in ("hf", "curves.png", "tensorboard", "samples", "metrics.jsonl"):
        assert str(run_dir / name) in text
    summary = read_summary(run_dir)
    assert summary["eval/standard_error_after"] == 0.02
    assert summary["gpu_hours"] == pytest.approx(8.0)
    # The next command is one that works.
    (command,) = [line[9:] for line in text.splitlines() if line.startswith("next")]
    make_tiny_model(run_dir / "hf")
    words = shlex.split(command)
    assert words[:2] == ["rlmath", "evaluate"]
    assert main([*words[1:], "--check"]) == 0
    assert "8 samples each, temperature 0.3," in capsys.readouterr().out
    # Greedy samples of a problem are all the same.
    config.eval.temperature = 0.0
    assert {"eval.samples=1", "eval.temperature=0.0"} <= set(
        shlex.split(ending(config, read_summary(run_dir)))
    )
    # On the same prompts, graded alike.
    again = load(words[2:])
    assert again.data == dataclasses.replace(config.data, train_paths=again.data.train_paths)
    assert again.reward.fallback == config.reward.fallback


def test_the_end_says_how_many_steps_were_skipped(tmp_path):
    config = load(["model.path=m", f"runner.run_dir={tmp_path}"])
    layout = SimpleNamespace(actor=Layout(), engines=1, accelerators=0)
    session = SimpleNamespace(layout=layout)
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write(step, {"sampling/trained_groups": 0.0, "rollout/rewards": 0.0})
    text = ending(config, summarize(config, session, {}))
    assert "all of them" in text and "no weight was changed" in text
    with MetricsWriter(tmp_path, last_step=2) as writer:
        writer.write(3, {"sampling/trained_groups": 4.0, "rollout/rewards": 1.0})
    text = ending(config, summarize(config, session, {}))
    assert "skipped  2 of them" in text and "no weight" not in text


def test_an_interrupted_run_has_its_curves(tmp_path):
    steps(tmp_path)
    (tmp_path / ATTEMPTS_FILE).write_text('{"after_step": 2, "config": "x", "started": ""}\n')
    with pytest.raises(KeyboardInterrupt), curves_if_interrupted(tmp_path):
        raise KeyboardInterrupt
    assert (tmp_path / "curves.png").is_file()
    # Before the first step there is nothing to draw, and the error is the run's own.
    with pytest.raises(RuntimeError, match="no GPU"), curves_if_interrupted(tmp_path / "none"):
        raise RuntimeError("no GPU")


def test_a_start_says_what_begins_and_where_its_output_is(tmp_path, capsys):
    say = StartLog(tmp_path / "logs")
    say("starting Ray")
    say("starting ranks", logs=True)
    say("starting engines", logs=True)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith(" s  starting Ray")
    assert second.endswith(f"; logs in {tmp_path / 'logs'}")
    assert "logs" not in third


def test_the_standard_error_of_a_reward_is_over_problems():
    """Equal samples of one problem are no evidence."""

    def group(number, rewards):
        return make_group([make_sample(f"p{number}", i) for i in range(len(rewards))], rewards)

    metrics = rollout_metrics([group(0, [1.0] * 8), group(1, [0.0] * 8), group(2, [None])])
    # Means 1 and 0: deviation sqrt(1/2), over sqrt(2) problems.
    assert metrics["rollout/rewards_standard_error"] == pytest.approx(0.5)
    assert "rollout/rewards_standard_error" not in rollout_metrics([group(0, [1.0, 0.0])])


@pytest.fixture(autouse=True)
def ends_the_process():
    """As the run's own handler does."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    yield
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_between_updates_it_ends_at_once():
    with pytest.raises(SystemExit) as ended, Grace(60, lambda: False):
        send()
        pytest.fail("it went on")
    assert ended.value.code == 143


def test_an_update_comes_to_its_end(capsys):
    reached = False
    with pytest.raises(SystemExit) as ended, Grace(60, lambda: True) as grace:
        grace.step_done()  # Nobody has asked.
        send()
        reached = True
        grace.step_done()
        pytest.fail("it went on")
    assert reached and ended.value.code == 143
    assert "or in 60 s (runner.grace_s)" in capsys.readouterr().out


def test_but_not_beyond_its_time_nor_a_second_signal():
    with pytest.raises(SystemExit), Grace(0.05, lambda: True):
        send()
        time.sleep(10)
        pytest.fail("it went on")
    with pytest.raises(SystemExit), Grace(60, lambda: True):
        send()
        send()
        pytest.fail("it went on")
    with pytest.raises(SystemExit), Grace(0, lambda: True):
        send()
        pytest.fail("it went on")


def test_what_fails_meanwhile_is_not_restarted():
    """A component's failure would have the run start again."""
    with pytest.raises(SystemExit), Grace(60, lambda: True):
        send()
        raise RuntimeError("the ranks were told to end, too")
    with pytest.raises(RuntimeError, match="a defect"), Grace(60, lambda: True):
        raise RuntimeError("a defect")


def test_the_handler_is_as_before():
    before = signal.getsignal(signal.SIGTERM)
    with Grace(60, lambda: True):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_wait_leave_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals_wait("a save"):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    reached = False
    with pytest.raises(SystemExit), signals_wait("a save"):
        send()
        reached = True
    assert reached
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_a_terminal_that_closes_tells_twice_and_ends_nothing_early():
    """The kernel and the shell both send SIGHUP; the grace ends with its time or a SIGTERM."""
    with ending_by_exit():
        reached = 0
        with pytest.raises(SystemExit) as ended, Grace(60, lambda: True) as grace:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                reached += 1
            grace.step_done()
        assert (reached, ended.value.code) == (3, 128 + signal.SIGHUP)
    with ending_by_exit(), pytest.raises(SystemExit), Grace(0.05, lambda: True):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(10)
        pytest.fail("it went on")


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_signals_that_end_jobs_unwind_the_run(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ending_by_exit():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_hangup_that_the_user_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_by_exit(), Grace(60, lambda: False):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
