"""Parts of a real run are killed or stopped; it ends as one that nothing happened to."""

import json
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from rlmath.checkpoint import CheckpointStore
from rlmath.checkpoint.manifest import read_manifest, verify
from rlmath.commands.bisect.compare import compare
from rlmath.monitor.run_folder import RunFolder
from tests.e2e.runs import metrics, quickstart_settings, rlmath
from tests.faults.broken import LAST_STEP, Run, assert_says_what_it_saved, damage, settings_of
from tests.unit.checkpoint.small_disk import small_disk

# Metrics that a clock decides, and those that a fault alone changes.
VARIES = (
    *("timing/", "throughput/", "time_s", "memory/"),
    *("rollout/engine_restarts", "rollout/idle_share"),
)


def test_faults_change_nothing(material, straight, tmp_path):
    """One engine and no fault, against two engines and: grading processes killed at work, an engine
    killed in mid-generation, a rank stopped in mid-update until the watchdog acts, a rank killed in
    mid-update, the driver killed with -9 in mid-checkpoint, and the two newest checkpoints damaged.
    The resumed run has one engine, and is ended by SIGTERM. Its ranks move their state to host
    memory while engines sample, which the run without a fault does not."""
    broken = tmp_path / "broken"
    settings = [
        *settings_of(material, broken),
        "rollout.engines=2",
        "actor.offload=all",
        "runner.background_checkpoints=true",
        "watchdog.stall_s=30",
    ]
    first = Run(broken, settings, tmp_path / "first.log")
    first.until_step(0)
    # Nobody outside this machine can reach Ray, the ranks or the engines.
    assert first.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, first.listening()
    first.kill_graders()
    first.until_step(1)
    first.send(signal.SIGKILL, "RolloutEngine.exchange")
    first.until_saved(3)
    stopped = first.send(signal.SIGSTOP, "ActorWorker.finish_step")
    first.until(lambda: first.output().count("resumed after step") == 1, "a restart")
    killed = first.send(signal.SIGKILL, "ActorWorker.finish_step")
    first.until(lambda: first.output().count("resumed after step") == 2, "the second restart")
    # The first save of an attempt takes longest, so that it is met.
    first.find("ActorWorker.save_checkpoint")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    output = first.output()
    # The faults came in steps that are compared below.
    again = [int(step) for step in re.findall(r"; steps? (\d+) .*repeated", output)]
    assert len(again) == 2 and max(again) < LAST_STEP, again
    assert "rollout.max_engine_restarts" in output
    assert "No progress for" in output
    assert "which is in finish_step" in output
    assert "is in the collective" in output
    assert "its process ended" in output
    assert not psutil.pid_exists(stopped)
    assert not psutil.pid_exists(killed)

    checkpoints = CheckpointStore(broken / "checkpoints", keep=1)
    before, truncated, flipped = checkpoints.steps()[-3:]
    said = [
        damage(checkpoints.path(truncated), "truncate"),
        damage(checkpoints.path(flipped), "flip a bit"),
    ]

    second = Run(broken, [*settings, "rollout.engines=1"], tmp_path / "second.log")
    second.until_saved(LAST_STEP)
    assert second.end(signal.SIGTERM, to="group") == 143, second.output()[-4000:]
    assert_says_what_it_saved(second)
    assert f"resumed after step {before} " in second.output()
    for step, what in zip((truncated, flipped), said, strict=True):
        assert f"skipped {checkpoints.path(step)}: {what}" in second.output()

    assert comparable(straight) == comparable(broken)
    assert [line["step"] for line in comparable(broken)] == list(range(LAST_STEP + 1))
    # All steps learned something.
    assert all(line["train/grad_norm"] > 1e-3 for line in comparable(broken)[1:])
    for step in range(1, LAST_STEP + 1):
        assert samples(straight, step) == samples(broken, step)
    assert tensors_of(straight) == tensors_of(broken)
    found = compare(RunFolder(straight), RunFolder(broken))
    assert found.parting is None, found.parting
    assert set(range(LAST_STEP + 1)) <= set(found.steps)


def comparable(run_dir):
    return [
        {k: v for k, v in line.items() if not k.startswith(VARIES) and "seconds" not in k}
        for line in metrics(run_dir)
        if line["step"] <= LAST_STEP
    ]


def samples(run_dir, step):
    """Text of each sample of a step; each once."""
    path = run_dir / "samples" / f"step_{step:06d}.jsonl"
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_key = {(s["problem_id"], s["index"]): s["response"] for s in found}
    assert len(by_key) == len(found) == 32
    return by_key


def tensors_of(run_dir):
    """Size and SHA-256 of the files with weights and Adam's moments."""
    folder = run_dir / "checkpoints" / f"step_{LAST_STEP:06d}"
    verify(folder)
    files = read_manifest(folder).files
    found = {name: value for name, value in files.items() if name.endswith(".distcp")}
    assert len(found) == 2
    return found


# Sums over other ranks round differently: seen were 2e-6 of a metric, and of differences between
# log-probs, which are roundings themselves, 2e-6 nats.
TOLERANCE = 1e-5


# Ranks alone: tests/distributed/test_checkpoint.py; a full disk: tests/unit/checkpoint.
@pytest.mark.long
def test_a_run_resumes_in_another_layout(material, straight, tmp_path):
    """From TP 2 to PP 2 after step 2: two steps of two updates each give the same samples, and the
    same metrics but for rounding. Its disk runs full in the second save: it ends with one message,
    and the first is whole."""
    settings = [
        *settings_of(material, tmp_path),
        f"runner.resume={straight / 'checkpoints' / 'step_000002'}",
        "actor.tensor_parallel=1",
        "actor.pipeline_parallel=2",
    ]
    log = tmp_path / "output.log"
    with small_disk(tmp_path / "checkpoints", size_kib=48 * 1024) as disk:
        run = Run(tmp_path, settings, log)
        run.until_saved(3)
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 2**22))
        assert run.wait_for_end() == 2, run.output()[-4000:]
        assert "error: The disk ran full while" in run.output()
        assert "Traceback" not in run.output()
        newest = CheckpointStore(disk, keep=1).newest_complete()
        assert newest.path == disk / "step_000003"
        assert sorted(one.name for one in disk.iterdir()) == ["filler", "step_000003"]
    assert "resumed after step 2" in run.output()
    expected = {line["step"]: line for line in comparable(straight)}
    found = comparable(tmp_path)
    assert [line["step"] for line in found] == [3, 4]
    for line in found:
        assert samples(straight, line["step"]) == samples(tmp_path, line["step"])
        same = {k: v for k, v in expected[line["step"]].items() if isinstance(v, float)}
        assert len(same) > 60
        assert {k: line[k] for k in same} == pytest.approx(same, rel=TOLERANCE, abs=1e-5)


# The same without ranks and engines: tests/unit/training/test_supervise.py.
@pytest.mark.long
def test_a_run_that_collapses_is_rolled_back_and_then_stopped(material, tmp_path):
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
