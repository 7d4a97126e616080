import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from rlmath.checkpoint import CheckpointStore, DiskFull, checkpoint_bytes
from rlmath.checkpoint import store as store_module
from rlmath.checkpoint.manifest import MANIFEST
from rlmath.errors import UserError
from tests.unit.checkpoint.small_disk import small_disk

STATE = {
    "step": 2,
    "seeds": [0, 2**63, -1],
    "rate": 0.1 + 0.2,
    "name": "Σ x²",
    "done": False,
    "pending": None,
    "nested": {"a": [{"b": 1e-300}]},
    "infinite": float("inf"),
}


def save(store, step, **metrics):
    """A checkpoint with two files, in place of the ranks'."""
    actor = store.begin(step) / "actor"
    actor.mkdir()
    (actor / "__0_0.distcp").write_bytes(bytes(range(256)) * 40 + step.to_bytes(4, "big"))
    (actor / "common.pt").write_bytes(b"common")
    return store.commit(step, STATE | {"step": step}, metrics)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_committed_checkpoint_is_found_on_resume(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.resume("auto") is None
    path = save(store, 12, reward=0.5)
    assert path.name == "step_000012"
    found = CheckpointStore(tmp_path / "checkpoints", keep=2).resume("auto")
    assert (found.path, found.step, found.metrics) == (path, 12, {"reward": 0.5})
    assert found.driver_state == STATE | {"step": 12}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": (1, 2)}, r"state\['a'\] is a tuple"),
        ({"a": [{"b": {1: 2}}]}, r"state\['a'\]\[0\]\['b'\] has the key 1"),
        ({"a": {"b": Path("x")}}, r"state\['a'\]\['b'\] is a PosixPath"),
    ],
)
def test_state_that_would_change_is_refused(tmp_path, state, where):
    store = CheckpointStore(tmp_path, keep=1)
    store.begin(1)
    with pytest.raises(TypeError, match=where):
        store.commit(1, state, {})


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, best={"accuracy": "max", "length": "min"})
    accuracy = [0.1, 0.9, 0.9, 0.2, float("nan"), 0.3, 0.4]
    for step, value in enumerate(accuracy):
        save(store, step, accuracy=value, length=abs(step - 1))
    # The later one of the two with 0.9; step 1 has the least length.
    assert store.steps() == [1, 2, 5, 6]
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 7)
    assert store.steps() == [7]


def test_the_same_step_again_replaces_the_older(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 4, reward=1.0)
    save(store, 4, reward=2.0)
    found = store.resume("auto")
    assert found is not None and found.metrics == {"reward": 2.0}
    assert names(tmp_path) == ["step_000004"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("actor/__0_0.distcp", flip, "actor/__0_0.distcp: its checksum differs"),
        ("actor/__0_0.distcp", truncate, "actor/__0_0.distcp has 10243 bytes instead of 10244"),
        ("actor/__0_0.distcp", Path.unlink, "actor/__0_0.distcp is missing"),
        ("driver_state.json", flip, "driver_state.json: its checksum differs"),
        (MANIFEST, flip, "manifest.json"),
        (MANIFEST, Path.unlink, "manifest.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(tmp_path, file, damage, reason):
    store = CheckpointStore(tmp_path, keep=2)
    older, newer = save(store, 1), save(store, 2)
    damage(newer / file)
    partial = store.begin(3)
    newest = store.newest_complete()
    assert newest.path == older
    assert [s.path for s in newest.skipped] == [newer]
    assert reason in newest.skipped[0].reason
    # To look disturbs nothing; to resume cleans up, and tells the same.
    assert partial.exists()
    found = store.resume("auto")
    assert found is not None and found.path == older and not partial.exists()
    assert [s.path for s in found.skipped] == [partial, newer]
    with pytest.raises(UserError, match=r"is incomplete|no checkpoint"):
        store.resume(str(newer))
    # A broken checkpoint does not push out a complete one.
    save(store, 3)
    assert store.steps() == [1, 2, 3]


def test_a_changed_metric_in_the_manifest_shows(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    path = save(store, 1, reward=1.0) / MANIFEST
    content = json.loads(path.read_text())
    content["metrics"]["reward"] = 9.0
    path.write_text(json.dumps(content))
    assert "does not match its own checksum" in store.newest_complete().skipped[0].reason


def test_without_a_complete_checkpoint_the_run_stops(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    flip(save(store, 1) / "actor" / "common.pt")
    truncate(save(store, 2) / "actor" / "common.pt")
    with pytest.raises(UserError, match=r"step_000002: .*\n.*step_000001: .*\n.*resume=never"):
        store.resume("auto")


def test_failed_resume_moves_no_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep=9)
    for step in (1, 2):
        save(store, step)

    def refuse(found):
        raise UserError(f"not from step {found.step}")

    with pytest.raises(UserError, match="not from step 1"):
        store.resume(str(folder / "step_000001"), refuse)
    with pytest.raises(UserError, match="not from step 2"):
        store.resume("auto", refuse)
    assert store.steps() == [1, 2] and names(tmp_path) == ["checkpoints"]


def test_never_and_a_path_move_newer_ones_aside(tmp_path):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    found = store.resume(str(folder / "step_000002"))
    assert found is not None and found.step == 2
    assert store.steps() == [1, 2]
    assert names(tmp_path / "checkpoints_set_aside_1") == ["step_000003"]
    assert store.resume("never") is None
    assert store.steps() == []
    assert names(tmp_path / "checkpoints_set_aside_2") == ["step_000001", "step_000002"]
    # From another run's folder: that one is only read.
    save(store, 5)
    other = tmp_path / "checkpoints_set_aside_2"
    found = store.resume(str(other / "step_000001"))
    assert found is not None and found.step == 1 and store.steps() == []
    assert names(other) == ["step_000001", "step_000002"]


def test_resuming_from_something_else_says_what_is_wanted(tmp_path):
    with pytest.raises(UserError, match="is no checkpoint"):
        CheckpointStore(tmp_path, keep=1).resume(str(tmp_path / "nothing"))


def save_and_die(folder, step, at):
    """Save in a separate process, killed with -9 before its ``at``-th file operation.

    Returns:
        Whether it came to that; else the save ended first.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event, arguments):
            nonlocal seen
            changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
            if changes or (event == "open" and str(arguments[0]).startswith(str(folder))):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            save(CheckpointStore(folder, keep=1), step, reward=2.0)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


@pytest.mark.process
@pytest.mark.parametrize("step", [1, 2], ids=["replacing the same step", "a new step"])
def test_killed_at_any_file_operation_one_complete_checkpoint_is_left(tmp_path, step):
    rewards, leftovers, at = [], set(), 0
    killed = True
    while killed:
        at += 1
        folder = tmp_path / str(at) / "checkpoints"
        save(CheckpointStore(folder, keep=1), 1, reward=1.0)
        killed = save_and_die(folder, step, at)
        store = CheckpointStore(folder, keep=1)
        found = store.resume("auto")
        for one in found.skipped:
            assert one.path.suffix in (".partial", ".replaced", ".deleted"), one
            leftovers.add(one.path.suffix)
        assert set(names(folder)) <= {"step_000001", "step_000002"}
        assert found.driver_state == STATE | {"step": found.step}
        rewards.append(found.metrics["reward"])
        save(store, 3)
        assert names(folder) == ["step_000003"]
    assert at > 15
    # First the old one, from some moment on the new one, and every kind of leftover was seen.
    assert rewards == sorted(rewards) and set(rewards) == {1.0, 2.0}
    assert leftovers == {".partial", ".deleted"} | ({".replaced"} if step == 1 else set())


def test_a_file_that_an_ending_rank_has_open_does_not_end_the_next_start(tmp_path, monkeypatch):
    """NFS keeps it in its folder under a hidden name, so the folder cannot be removed yet."""
    monkeypatch.setattr(store_module, "_OPEN_S", 0.6)
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    store.begin(2)
    remove, held = shutil.rmtree, [2]

    def rmtree(folder):
        held[0] -= 1
        if held[0] >= 0:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert store.resume("auto").step == 1 and names(tmp_path) == ["step_000001"]
    # A reader of an old checkpoint does not end the run that deletes it.
    held[0] = 10**6
    save(store, 3)
    assert names(tmp_path) == ["step_000001.deleted", "step_000003"]
    held[0] = 0
    assert store.resume("auto").step == 3 and names(tmp_path) == ["step_000003"]


def test_an_abandoned_save_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    (store.begin(1) / "part").write_bytes(b"x")
    store.abandon(1)
    assert names(tmp_path) == []


def test_the_size_of_a_checkpoint():
    # 1.5 billion parameters in bfloat16: 2 bytes, two moments and a main parameter of 4 each.
    size = checkpoint_bytes(1_500_000_000, 2, distributed_optimizer=True)
    assert size == 1_500_000_000 * 14 + 2**20
    assert checkpoint_bytes(1000, 4, distributed_optimizer=False) == 12_000 + 2**20
    assert checkpoint_bytes(1000, 4, distributed_optimizer=True) == 16_000 + 2**20


def test_a_disk_that_runs_full_in_the_commit(tmp_path):
    with small_disk(tmp_path / "small", size_kib=256) as disk:
        store = CheckpointStore(disk / "checkpoints", keep=3)
        first = save(store, 1)
        (store.begin(2) / "part").write_bytes(b"x")
        state = {"groups": ["token ids of half-filled groups " * 20_000]}
        with pytest.raises(DiskFull, match=r"ran full while .*step_000002 was written; free are"):
            store.commit(2, state, {})
        assert names(store.folder) == ["step_000001"]
        assert store.newest_complete().path == first
