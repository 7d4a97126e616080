"""Start and inputs of a replay, or one message that says what is missing."""

import json

import pytest

from rlmath.checkpoint.manifest import write_manifest
from rlmath.commands.replay.source import read_source
from rlmath.errors import UserError
from rlmath.training.kept_files import FOLDER, kept_file
from rlmath.utils.array_file import write_arrays
from tests.unit.commands.made_run import Run


def keep(folder, *steps):
    (folder / FOLDER).mkdir(exist_ok=True)
    for step in steps:
        with kept_file(folder / FOLDER, step).open("wb") as file:
            write_arrays(file, {"step": step, "keys": ["a/0"]}, {})


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "tensors").write_bytes(bytes(range(100)))
    write_manifest(path, step, {})
    return path


def refusal(run_dir, step, begin=None):
    with pytest.raises(UserError) as error:
        read_source(run_dir, step, begin)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def run_dir(tmp_path):
    """Steps 1 to 6; 4 trained nothing; checkpoints after 2 and 5; all batches."""
    run = Run(tmp_path / "run").go(last=6)
    path = run.folder / "digests.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == 4:
            for phase in ("groups", "gradient", "weights", "advantages", "old_log_probs"):
                del line[phase]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    keep(run.folder, 1, 2, 3, 5, 6)
    checkpoint(run.folder, 2)
    checkpoint(run.folder, 5)
    return run.folder


def test_the_nearest_checkpoint_is_where_it_begins(run_dir):
    wanted = {6: (5, (6,)), 5: (2, (3, 5)), 3: (2, (3,)), 2: (0, (1, 2)), 1: (0, (1,))}
    for step, (begin, steps) in wanted.items():
        found = read_source(run_dir, step)
        assert (found.start.step, found.steps) == (begin, steps), step
        assert (found.start.path is None) == (begin == 0)
    assert read_source(run_dir, 6, begin=0).steps == (1, 2, 3, 5, 6)
    assert read_source(run_dir, 6).headers[6]["keys"] == ["a/0"]


def test_a_damaged_checkpoint_is_skipped_and_named(run_dir):
    (run_dir / "checkpoints" / "step_000005" / "tensors").write_bytes(bytes(100))
    found = read_source(run_dir, 6)
    assert found.steps == (3, 5, 6) and "step_000005" in found.broken[0]
    (run_dir / "checkpoints" / "step_000002" / "tensors").unlink()
    assert read_source(run_dir, 6).start.step == 0
    kept_file(run_dir / FOLDER, 1).unlink()
    assert "step_000002: tensors is missing" in refusal(run_dir, 6)


def test_a_step_that_is_not_there(run_dir):
    assert "step 7: there is none" in refusal(run_dir, 7) and "steps 1 to 6" in refusal(run_dir, 7)
    keep(run_dir, 7)
    assert "step 7: it was begun and not finished" in refusal(run_dir, 7)
    assert "step 4 trained nothing" in refusal(run_dir, 4)
    assert "not a folder" in refusal(run_dir / "nowhere", 1)
    assert "neither metrics.jsonl nor samples/" in refusal(run_dir / "samples", 1)


def test_a_batch_that_is_gone(run_dir):
    """The message names it, the setting, and what is left."""
    kept_file(run_dir / FOLDER, 1).unlink()
    kept_file(run_dir / FOLDER, 3).unlink()
    said = refusal(run_dir, 5)
    assert "the checkpoint step_000002" in said and "the batch of step 3 is" in said
    assert "runner.replay_keep_gib" in said and "can be replayed: 6" in said
    assert read_source(run_dir, 6).start.step == 5
    for step in (2, 5, 6):
        kept_file(run_dir / FOLDER, step).unlink()
    said = refusal(run_dir, 2)
    assert "2 steps, 1 to 2," in said and "no batches at all" in said
    assert "no step of this run can be replayed" in said


def test_a_damaged_batch_is_refused_at_once(run_dir):
    path = kept_file(run_dir / FOLDER, 6)
    path.write_bytes(path.read_bytes()[:20])
    assert "the batch of step 6 cannot be read" in refusal(run_dir, 6)


def test_replay_refuses_a_wrong_start_step(run_dir):
    said = refusal(run_dir, 6, begin=3)
    assert "--from 3" in said and "a checkpoint of step 2" in said and "initial weights" in said
    assert "step 2 is not after it" in refusal(run_dir, 2, begin=5)


def test_a_run_that_began_elsewhere(run_dir, tmp_path):
    """From another run's checkpoint: its initial weights are those, while they are there."""
    other = tmp_path / "other"
    theirs = run_dir / "checkpoints" / "step_000002"
    run = Run(other, f"runner.resume={theirs}").go(3, 4, resumed=True)
    keep(run.folder, 3, 4)
    found = read_source(other, 4)
    assert found.start.path == theirs and found.steps == (3, 4)
    theirs.rename(tmp_path / "moved")
    assert "no checkpoint, and none before the step" in refusal(other, 4)


def test_settings_are_those_of_the_attempt(run_dir):
    Run(run_dir, "actor.optimizer.lr=0.5").go(6, 7, resumed=True)
    keep(run_dir, 6, 7)
    found = read_source(run_dir, 7)
    before, now = (found.run.settings_of(step)["actor"]["optimizer"]["lr"] for step in (5, 6))
    assert before != now == 0.5
