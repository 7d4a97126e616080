"""Parts of a real run are killed or stopped; it ends as one that nothing happened to."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from tests.e2e.runs import metrics, quickstart_settings, rlmath
from tests.faults.broken import Run

# What a clock decides, and what a fault alone changes.
VARIES = ("timing/", "throughput/", "time_s", "rollout/engine_restarts")


def test_faults_change_nothing(material: Path, tmp_path: Path) -> None:
    """One engine and no fault, against two engines and: an engine killed in mid-generation, a rank
    stopped in mid-update until the watchdog acts, a rank killed in mid-update, the driver killed
    with -9 in mid-checkpoint."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    reward = Path(__file__).parent / "rewards_for_tests.py"
    changes = [
        f"reward.items=[{{name:'{reward}:letters'}}]",
        "eval.every=3",
        "runner.steps=6",
        "runner.save_every=2",
        "runner.resume=auto",
    ]
    run = rlmath("train", *quickstart_settings(material, straight), *changes)
    assert run.returncode == 0, run.stderr

    changes += ["rollout.engines=2", "runner.background_checkpoints=true", "watchdog.stall_s=20"]
    settings = [*quickstart_settings(material, broken), *changes]
    first = Run(settings, tmp_path / "first.log")
    first.until_step(1)
    # Nobody outside this machine can reach Ray, the ranks or the engines.
    assert first.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, first.listening()
    first.send(signal.SIGKILL, "RolloutEngine.exchange")
    first.until_step(2)
    stopped = first.send(signal.SIGSTOP, "ActorWorker.update")
    first.until(lambda: first.output().count("done again") == 1, "a restart of the watchdog")
    first.until(lambda: "resumed after step 2" in first.output(), "a resume")
    first.until_step(3)
    killed = first.send(signal.SIGKILL, "ActorWorker.update")
    first.until(lambda: first.output().count("done again") == 2, "the second restart")
    first.until_step(4)
    first.find("ActorWorker.begin_checkpoint")
    first.process.kill()
    first.wait()
    first.assert_nothing_left()
    output = first.output()
    assert "rollout.max_engine_restarts" in output
    assert "nothing has got on for" in output
    assert "which is in update" in output
    assert "is in the collective" in output
    assert not psutil.pid_exists(stopped)
    assert not psutil.pid_exists(killed)

    second = Run(settings, tmp_path / "second.log")
    assert second.wait() == 0, second.output()[-4000:]
    second.assert_nothing_left()
    assert "resumed after step" in second.output()

    assert [line["step"] for line in metrics(broken)] == list(range(7))
    assert comparable(metrics(straight)) == comparable(metrics(broken))
    for step in range(1, 7):
        assert samples(straight, step) == samples(broken, step)
    one = load_file(straight / "hf" / "model.safetensors")
    other = load_file(broken / "hf" / "model.safetensors")
    assert all((one[name] == other[name]).all() for name in one)


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not k.startswith(VARIES) and "seconds" not in k}
        for line in lines
    ]


def samples(run_dir: Path, step: int) -> dict[tuple[str, int], str]:
    """Text of each sample of a step; each once."""
    path = run_dir / "samples" / f"step_{step:06d}.jsonl"
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_key = {(s["problem_id"], s["index"]): s["response"] for s in found}
    assert len(by_key) == len(found) == 32
    return by_key


def test_a_run_that_collapses_is_rolled_back_and_then_stopped(
    material: Path, tmp_path: Path
) -> None:
    """A reward for brevity alone: responses shrink. The detector takes the run back to before,
    with half the learning rate; when they shrink again it ends, and says why."""
    reward = Path(__file__).parent / "rewards_for_tests.py"
    run = rlmath(
        "train",
        *quickstart_settings(material, tmp_path),
        f"reward.items=[{{name:'{reward}:brevity'}}]",
        "eval.every=0",
        "actor.tensor_parallel=1",
        "actor.optimizer.lr=5e-3",
        "runner.steps=60",
        "runner.save_every=1",
        "runner.keep_checkpoints=8",
        "algorithm.group_size=8",
        "collapse.baseline_steps=2",
        "collapse.patience_steps=2",
        "collapse.length_drift=1.5",
        "collapse.rollback_on=[length_drift]",
        "collapse.max_rollbacks=1",
    )
    assert run.returncode == 2, run.stderr[-4000:]
    (entry,) = json.loads((tmp_path / "rollbacks.json").read_text())
    assert "length_drift" in entry["reason"]
    assert entry["lr_factor"] == 0.5
    # The checkpoints of the two steps of the streak are put aside, those before are not.
    assert entry["to"] == entry["step"] - 2
    assert (tmp_path / "checkpoints_set_aside_1" / f"step_{entry['step'] - 1:06d}").is_dir()
    assert f"resumed after step {entry['to']} from" in run.stdout
    assert "the run collapsed again after 1 rollbacks" in run.stderr
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    rates = {line["step"]: line["train/lr"] for line in lines}
    assert rates[entry["to"] + 1] < 0.6 * rates[entry["to"]]
