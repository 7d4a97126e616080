"""Runs of other schedules, killed while they sample: nothing of them is lost, or different."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from rlmath.monitor.digests import read_digests
from tests.e2e.runs import ROOT, check_replay, metrics, quickstart_settings, rlmath
from tests.faults.broken import Run

# Metrics that a clock decides.
VARIES = (
    *("timing/", "throughput/", "time_s", "memory/", "schedule/"),
    *("rollout/idle_share", "rollout/engine_restarts"),
)
SETTINGS = [
    "actor.tensor_parallel=1",
    "eval.every=0",
    "runner.resume=auto",
    "runner.save_every=2",
    "runner.steps=4",
    "runner.check_export_sequences=0",
    f"reward.items=[{{name: '{ROOT / 'tests' / 'e2e' / 'odd_reward.py'}:odd'}}]",
    "algorithm.correction.kind=token_truncate",
]
CARRY_OVER = ["rollout.schedule=carry_over", "rollout.cut_after_tokens=20", "rollout.max_lag=2"]


PIPELINED = ["rollout.schedule=pipelined"]


def check_carry_over(lines):
    assert lines[-1]["rollout/lag_max"] == 2 and lines[-1]["rollout/mixed_sample_share"] > 0
    # Tokens of older weights differ, those of the present ones do not.
    assert lines[-1]["mismatch/lag_1/k3"] > 100 * lines[-1]["mismatch/lag_0/k3"] > 0
    truncated = [lines[-1][f"correction/lag_{lag}/truncated_tokens"] for lag in (0, 1)]
    assert truncated[0] <= truncated[1] < 1


def check_pipelined(lines):
    assert [line["rollout/lag_mean"] for line in lines] == [0, 1, 1, 1]
    assert not any(line["rollout/mixed_sample_share"] for line in lines)
    # The gate has tokens of the present weights all the same.
    assert all(0 < line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    assert lines[-1]["mismatch/lag_1/k3"] > 1e-6
    assert all("schedule/engines_waited_s" in line for line in lines)


@pytest.mark.parametrize(
    ("schedule", "look", "killed_at"),
    [
        # Proven without a run: tests/unit/rollout/test_carry_over.py. The continuous run
        # below is killed in the middle of sampling too.
        pytest.param(CARRY_OVER, check_carry_over, 3, id="carry_over", marks=pytest.mark.long),
        # Sampled while step 3 trains.
        pytest.param(PIPELINED, check_pipelined, 4, id="pipelined", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_continues_with_what_was_sampled(
    schedule, look, killed_at, material, tmp_path
):
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def settings(folder, *more):
        return ["train", *quickstart_settings(material, folder), *SETTINGS, *schedule, *more]

    run = rlmath(*settings(straight, "rollout.engines=2"))
    assert run.returncode == 0, run.stderr
    lines = metrics(straight)
    look(lines)
    assert all(line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    assert not list((straight / "journal").glob("*")), "a checkpoint covers all steps"
    # All of it again, from what was kept of samples of several weights versions.
    found = check_replay(straight, "4", "--from", "0")
    assert [one["step"] for one in found["steps"]] == [1, 2, 3, 4]
    assert all(one["bit_equal"] for one in found["steps"])

    given = settings(killed, "rollout.engines=2")[1:]
    first = Run(killed, given, tmp_path / "first.log")
    # While it samples for the next step, the actor trains: a new engine gets the next weights.
    first.until_step(1)
    first.send(signal.SIGKILL, "RolloutEngine.exchange")
    _kill_while_sampling(first, killed_at)
    assert "(1 of rollout.max_engine_restarts" in first.output()
    assert len(metrics(killed)) == 2
    run = rlmath(*settings(killed, "rollout.engines=1"))
    assert run.returncode == 0, run.stderr
    assert "samples came from the journal" in run.stdout
    _check_same(killed, straight)


def _check_same(killed, straight):
    """Two runs, with any number of engines."""
    assert _ledger(killed) == _ledger(straight)
    for step in range(1, 5):
        assert _samples(killed, step) == _samples(straight, step)
    for one, other in zip(metrics(straight), metrics(killed), strict=True):
        expected = {
            k: v
            for k, v in one.items()
            if isinstance(v, float) and not k.startswith(VARIES) and "seconds" not in k
        }
        found = {k: v for k, v in other.items() if k in expected}
        # Sequences share an engine's batch with others as they come, which may change a last digit
        # of their log-probs.
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights, again = (load_file(f / "hf" / "model.safetensors") for f in (straight, killed))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, again[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.long
def test_without_a_lag_each_schedule_is_synchronous_to_the_last_bit(material, tmp_path):
    """Samples, log-probs, gradients and weights of each step, by their digests, and what became of
    each group; and with a budget that cuts nothing."""

    def run(name, *schedule):
        folder = tmp_path / name
        settings = [*quickstart_settings(material, folder), *SETTINGS, "runner.steps=3"]
        done = rlmath("train", *settings, *schedule)
        assert done.returncode == 0, done.stderr
        digests = [dict(line) for line in read_digests(folder)]
        for line in digests:
            del line["settings"]
        return digests, _ledger(folder), metrics(folder)[-1].keys()

    digests, ledger, names = run("synchronous")
    assert len([line for line in digests if "weights" in line]) == 3
    budget = ["rollout.schedule=carry_over", "rollout.cut_after_tokens=20", "rollout.max_lag=0"]
    for name, schedule in (
        ("carry_over", budget),
        ("pipelined", ["rollout.schedule=pipelined", "rollout.max_lag=0"]),
        ("continuous", ["rollout.schedule=continuous", "rollout.max_lag=0"]),
    ):
        assert run(name, *schedule) == (digests, ledger, names), name
    whole = ["rollout.schedule=carry_over", "rollout.cut_after_tokens=4096", "rollout.max_lag=2"]
    assert run("uncut", *whole)[:2] == (digests, ledger)


@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.long)])
def test_a_continuous_run_is_killed_and_every_update_can_be_done_again(material, tmp_path, kv):
    """It does not repeat itself; its bounds hold over the restart, and each update is in its
    batch, with what was sampled from old keys and values too."""
    folder = tmp_path / "run"
    settings = [
        *("train", *quickstart_settings(material, folder), *SETTINGS),
        *("rollout.schedule=continuous", "rollout.max_lag=2", "rollout.engines=2"),
        f"rollout.kv={kv}",
        # Engines that are slower than the actor have running responses when it is done.
        *("rollout.max_running_sequences=1", "rollout.max_response_tokens=96"),
        *("rollout.ignore_eos=true", "algorithm.prompts_per_step=4"),
    ]
    first = Run(folder, settings[1:], tmp_path / "first.log")
    first.until_step(1)
    first.send(signal.SIGKILL, "RolloutEngine.exchange")
    first.until_step(2)
    _kill_while_sampling(first, 4)
    assert "(1 of rollout.max_engine_restarts" in first.output()
    run = rlmath(*settings)
    assert run.returncode == 0, run.stderr
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/lag_max"] <= 2 for line in lines) and lines[-1]["rollout/lag_max"] > 0
    assert all(line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    assert all("schedule/actor_waited_s" in line for line in lines)
    ledger = _ledger(folder)
    trained = [event["group"] for event in ledger if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == 4 * 4
    rows = [row for step in range(1, 5) for row in _samples(folder, step)]
    assert any(len(row["spans"]) > 1 for row in rows), "no response has tokens of two versions"
    again = rlmath("replay", str(folder), "4")
    assert again.returncode == 0, again.stderr
    assert "step 4: equal to the last bit" in again.stdout, again.stdout


def _kill_while_sampling(run, step):
    journal = run.run_dir / "journal"

    def has_some():
        return any(path.stat().st_size for path in journal.glob(f"step_{step:06d}.*"))

    run.until(has_some, f"samples of step {step}")
    assert run.end(signal.SIGKILL) == -signal.SIGKILL


def _ledger(folder):
    """The events in force, of the groups in their order."""
    found = []
    for line in (folder / "ledger.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "resumed":
            found = [one for one in found if one["step"] <= event["step"]]
        else:
            found.append(event)
    return found


def _samples(folder, step):
    # Bytes: a random model's text has characters that end a line of text.
    rows = (folder / "samples" / f"step_{step:06d}.jsonl").read_bytes().splitlines()
    varies = ("engine", "log_probs")
    return [{k: v for k, v in json.loads(row).items() if k not in varies} for row in rows]
