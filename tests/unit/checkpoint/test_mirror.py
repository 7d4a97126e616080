"""A mirrored run: what is in the remote folder is complete, whatever the store does."""

import shutil
import threading
import time

import pytest

from rlmath.checkpoint import CheckpointStore
from rlmath.checkpoint.fetch import fetch_run
from rlmath.checkpoint.manifest import MANIFEST, verify
from rlmath.checkpoint.mirror import Mirror, MirrorIncomplete, Pace, mirroring
from rlmath.checkpoint.remote import RemoteFolder
from rlmath.checkpoint.remote_owner import NotOurs, claim
from rlmath.errors import UserError
from rlmath.training.checkpointing import Saver
from tests.support.remote_store import faulty_store

URL = "memory://bucket/runs/mine"
ROOT = "/bucket/runs/mine"
QUICK = Pace(0.01, 0.01, 0.02)


@pytest.fixture
def remote():
    with faulty_store() as store:
        yield store
        # None may write to the next test's store.
        for thread in threading.enumerate():
            if thread.name == "mirror":
                thread.join(60)
                assert not thread.is_alive()


class Run:
    """A run's folder, with checkpoints of two small files."""

    def __init__(self, folder, keep=2):
        self.folder = folder
        self.store = CheckpointStore(folder / "checkpoints", keep, {"reward": "max"})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("seed: 0\n")

    def save(self, step, reward=0.0, mark=b""):
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        actor = self.store.begin(step) / "actor"
        actor.mkdir()
        (actor / "__0_0.distcp").write_bytes(step.to_bytes(4, "big") * 1000 + mark)
        (actor / "__1_0.distcp").write_bytes(bytes(step))
        return self.store.commit(step, {"step": step}, {"reward": reward})

    def mirror(self, limit_s=60):
        remote = RemoteFolder(URL, limit_s=limit_s)
        return Mirror(self.folder, claim(remote, self.folder), QUICK)

    def files(self, under):
        """All files below a folder of the run's."""
        found = {p: p.read_bytes() for p in (self.folder / under).rglob("*") if p.is_file()}
        return {str(p.relative_to(self.folder)): data for p, data in found.items()}


def steps(remote):
    """Steps of the remote checkpoints that have a manifest."""
    names = [n.split("/") for n in remote.bytes_of(URL)]
    return sorted(int(n[1][5:]) for n in names if n[0] == "checkpoints" and n[2:] == [MANIFEST])


def hanging_until(released):
    """An upload that hangs, and then fails."""

    def hang(path):
        released.wait()
        raise TimeoutError(path)

    return hang


def until(holds, limit_s=20.0):
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_run_folder_arrives_byte_by_byte_and_resumes_elsewhere(tmp_path, remote, scheme, capsys):
    url = URL if scheme == "memory" else f"file://{tmp_path}/bucket"
    run = Run(tmp_path / "run")
    left_out = ("journal/a", "replay/b", ".config.yaml.x1", "checkpoints_set_aside_1/c")
    for name in ("logs/rank_0.log", "samples/step_1.jsonl", "hf/config.json", *left_out):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text(name)
    with mirroring(run.folder, url, wait_s=60):
        for step in (1, 2, 3):
            run.save(step)
    there = RemoteFolder(url).sizes()
    for name in left_out:
        assert name not in there
    other = Run(tmp_path / "elsewhere")
    shutil.rmtree(other.folder)
    assert fetch_run(url, other.folder, "checkpoints") == "auto"
    assert other.files("checkpoints/step_000003") == run.files("checkpoints/step_000003")
    assert other.files("samples") == run.files("samples")
    for name in ("config.yaml", "metrics.jsonl"):
        assert (other.folder / name).read_bytes() == (run.folder / name).read_bytes()
    assert "hf/config.json" in there and not (other.folder / "hf").exists()
    found = other.store.resume("auto")
    assert found is not None and (found.step, found.driver_state) == (3, {"step": 3})
    # The run continues there, under the same id; what is there already is not downloaded again.
    assert fetch_run(url, other.folder, "checkpoints") == "auto"
    assert "nothing is downloaded" in capsys.readouterr().out
    with mirroring(other.folder, url, wait_s=60):
        other.save(4)
    assert not (other.folder / ".mirror" / "checkpoint").exists()
    assert "checkpoints/step_000004/manifest.json" in RemoteFolder(url).sizes()


def test_saver_continues_from_a_downloaded_checkpoint(tmp_path, remote):
    class Ranks:
        changed, loaded = False, b""

        def save_checkpoint(self, folder, in_background=False):
            (folder / "tensors").write_bytes(b"weights" * 1000)

        def load_checkpoint(self, folder):
            self.loaded = (folder / "tensors").read_bytes()

    class Counter:
        value = 7

        def snapshot(self):
            return lambda: {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    with mirroring(tmp_path / "run", URL, wait_s=60):
        saver = Saver(store, Ranks(), {"sampler": Counter()})
        saver.step_done(5, {"reward": 0.5})
        saver.save()
    fetch_run(URL, tmp_path / "other", "checkpoints")
    other = CheckpointStore(tmp_path / "other" / "checkpoints", keep=1)
    found, ranks, counter = other.resume("auto"), Ranks(), Counter()
    assert found is not None and found.metrics == {"reward": 0.5}
    counter.value = 0
    saver = Saver(other, ranks, {"sampler": counter})
    saver.restore(found, None)
    assert (saver.committed_step, ranks.loaded, counter.value) == (5, b"weights" * 1000, 7)


def test_upload_that_dies_leaves_no_checkpoint_and_is_finished_later(tmp_path, remote, capsys):
    run = Run(tmp_path / "run")

    def die(path):
        if path.endswith("step_000002/actor/__1_0.distcp"):
            raise OSError(104, "Connection reset by peer")

    remote.before.append(die)
    run.save(1)
    run.save(2)
    problem = run.mirror().close(30)
    assert "step_000002/actor/__1_0.distcp" in problem and "Connection reset" in problem
    assert "incomplete" in problem and URL in problem
    assert f"{ROOT}/checkpoints/step_000002/actor/__0_0.distcp" in remote.store
    assert steps(remote) == []
    with pytest.raises(UserError, match="step_000002: its upload was not finished"):
        fetch_run(URL, tmp_path / "other", "checkpoints")
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "training continues" in said
    remote.before.clear()
    assert run.mirror().close(30) == ""
    assert steps(remote) == [1, 2]


DAMAGE = {
    "truncated": (
        "actor/__0_0.distcp",
        lambda data: data[:-1],
        "has 3999 bytes instead of 4000",
    ),
    "flipped": ("actor/__0_0.distcp", lambda d: d[:-1] + bytes([d[-1] ^ 1]), "checksum differs"),
    "gone": ("actor/__0_0.distcp", lambda _: None, "actor/__0_0.distcp is missing"),
    "no manifest": (MANIFEST, lambda _: None, "its upload was not finished"),
    "manifest": (MANIFEST, lambda d: d.replace(b'"step": 2', b'"step": 9'), "own checksum"),
    "manifest's end": (MANIFEST, lambda data: data[:-9], "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_skipped_by_name(tmp_path, remote, damage, capsys):
    run = Run(tmp_path / "run")
    with mirroring(run.folder, URL, wait_s=60):
        run.save(1)
        run.save(2)
    file, change, reason = DAMAGE[damage]
    remote.damage(f"{ROOT}/checkpoints/step_000002/{file}", change)
    fetch_run(URL, tmp_path / "other", "checkpoints")
    said = capsys.readouterr().out
    assert "step_000002" in said and reason in said
    store = CheckpointStore(tmp_path / "other" / "checkpoints", keep=1)
    assert store.steps() == [1] and verify(store.path(1)).step == 1
    assert [p.name for p in store.folder.iterdir()] == ["step_000001"]
    # By its own URL, it is refused.
    with pytest.raises(UserError, match="no complete checkpoint"):
        fetch_run(f"{URL}/checkpoints/step_000002", tmp_path / "third", "checkpoints")


def test_manifest_without_its_files_is_no_checkpoint(tmp_path, remote):
    run = Run(tmp_path / "run")
    with mirroring(run.folder, URL, wait_s=60):
        run.save(1)
    for path in list(remote.store):
        if "step_000001/" in path and not path.endswith(MANIFEST):
            del remote.store[path]
    with pytest.raises(UserError, match=r"step_000001: actor/__0_0\.distcp is missing"):
        fetch_run(URL, tmp_path / "other", "checkpoints")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damage_in_an_upload_is_found_and_uploaded_again(tmp_path, remote, damage, capsys):
    run, left = Run(tmp_path / "run"), ["once"]

    def spoil(path):
        if path.endswith("__0_0.distcp") and left:
            left.pop()
            remote.damage(path, DAMAGE[damage][1])

    remote.after.append(spoil)
    path = run.save(1)
    assert run.mirror().close(30) == ""
    there = remote.bytes_of(f"{URL}/checkpoints/step_000001")
    assert there["actor/__0_0.distcp"] == (path / "actor" / "__0_0.distcp").read_bytes()
    assert "__0_0.distcp" in capsys.readouterr().err


def test_rate_limited_store_is_warned_about_once_and_completed(tmp_path, remote, capsys):
    run, left = Run(tmp_path / "run"), [1, 2]

    def limit(path):
        if path.endswith("config.yaml") and left:
            left.pop()
            raise PermissionError(429, "Too Many Requests")

    remote.before.append(limit)
    run.save(1)
    mirror = run.mirror()
    until(lambda: steps(remote) == [1])
    assert mirror.close(30) == ""
    captured = capsys.readouterr()
    assert captured.err.count("warning: runner.mirror") == 1 and "429" in captured.err
    assert "again" in captured.out


def test_store_that_hangs_does_not_keep_the_run(tmp_path, remote):
    run, release = Run(tmp_path / "run"), threading.Event()
    remote.before.append(hanging_until(release))
    run.save(1)
    begun_s = time.monotonic()
    problem = run.mirror().close(0.5)
    release.set()
    assert time.monotonic() - begun_s < 10
    assert "runner.mirror_wait_s=0.5" in problem and "checkpoints/step_000001" in problem
    assert steps(remote) == []


def test_call_that_hangs_is_given_up_and_made_again(tmp_path, remote, capsys):
    run, release, hung = Run(tmp_path / "run"), threading.Event(), [1]

    def hang(path):
        if path.endswith("config.yaml") and hung:
            hung.pop()
            hanging_until(release)(path)

    remote.before.append(hang)
    run.save(1)
    mirror = run.mirror(limit_s=2)
    until(lambda: steps(remote) == [1])
    assert mirror.close(30) == ""
    release.set()
    assert "no answer for 2" in capsys.readouterr().err


def test_remote_folder_belongs_to_one_run(tmp_path, remote):
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    first.save(1)
    assert first.mirror().close(30) == ""
    second.save(9)
    with pytest.raises(NotOurs, match="holds another run") as error:
        second.mirror()
    assert str(first.folder) in str(error.value) and f"runner.resume={URL}" in str(error.value)
    assert steps(remote) == [1]
    # Nor can it take the other's checkpoints into its folder.
    with pytest.raises(UserError, match="has another run"):
        fetch_run(URL, second.folder, "checkpoints")
    assert second.store.steps() == [9]
    remote.store.clear()
    remote.pseudo_dirs[:] = [""]
    remote().pipe_file(f"{ROOT}/thesis.pdf", b"pdf")
    with pytest.raises(NotOurs, match=r"holds thesis\.pdf and no run"):
        second.mirror()


def test_earlier_start_leaves_the_folder_to_a_later_one(tmp_path, remote):
    run = Run(tmp_path / "run")
    run.save(1)
    earlier = run.mirror()
    until(lambda: steps(remote) == [1])
    fetch_run(URL, tmp_path / "other", "checkpoints")
    other = Run(tmp_path / "other")
    later = other.mirror()
    run.save(2, mark=b"earlier")
    assert "taken over by" in earlier.close(30)
    other.save(2, mark=b"later")
    assert later.close(30) == ""
    there = remote.bytes_of(f"{URL}/checkpoints/step_000002/actor")
    assert there["__0_0.distcp"].endswith(b"later")


def test_remote_checkpoints_are_kept_as_the_runs(tmp_path, remote):
    run = Run(tmp_path / "run", keep=2)
    mirror = run.mirror()
    for step in range(1, 7):
        run.save(step, reward=float(step == 2))
        if step in (2, 4):
            until(lambda step=step: step in steps(remote))
    assert mirror.close(30) == ""
    assert steps(remote) == run.store.steps() == [2, 5, 6]
    # Nothing is left of the others.
    assert not any("step_000001" in path or "step_000004" in path for path in remote.store)


def test_rollback_withdraws_what_was_set_aside(tmp_path, remote):
    run = Run(tmp_path / "run", keep=3)
    mirror = run.mirror()
    for step in (1, 2, 3):
        run.save(step)
    until(lambda: steps(remote) == [1, 2, 3])
    run.store.set_aside(newer_than=1)
    until(lambda: steps(remote) == [1])
    # A step that is done again is another checkpoint.
    run.save(2, mark=b"again")
    until(lambda: steps(remote) == [1, 2])
    assert mirror.close(30) == ""
    there = remote.bytes_of(f"{URL}/checkpoints/step_000002/actor")
    assert there["__0_0.distcp"].endswith(b"again")


def test_checkpoint_replaced_in_place_is_uploaded_again(tmp_path, remote):
    run = Run(tmp_path / "run")
    run.save(1)
    assert run.mirror().close(30) == ""
    run.save(1, mark=b"other")
    assert run.mirror().close(30) == ""
    there = remote.bytes_of(f"{URL}/checkpoints/step_000001")
    assert there["actor/__0_0.distcp"].endswith(b"other")


def test_remote_checkpoints_outlive_a_lost_folder(tmp_path, remote):
    run = Run(tmp_path / "run")
    run.save(1)
    run.save(2)
    assert run.mirror().close(30) == ""
    shutil.rmtree(run.store.folder)
    with pytest.raises(NotOurs, match="holds step 2 of this run"):
        run.mirror()
    fetch_run(URL, run.folder, "checkpoints")
    assert run.store.steps() == [2]
    assert run.mirror().close(30) == ""
    assert 2 in steps(remote)


def test_checkpoint_deleted_while_it_is_uploaded_still_arrives(tmp_path, remote, capsys):
    run, left, arrived = Run(tmp_path / "run", keep=1), [1], []

    def overtake(path):
        if "step_000001" in path and left:
            left.pop()
            run.save(2)
            assert run.store.steps() == [2]
        if "step_000002" in path:
            arrived.extend(steps(remote))

    # Saves are faster than uploads.
    remote.after.append(overtake)
    run.save(1, reward=-1.0)
    mirror = run.mirror()
    until(lambda: 2 in steps(remote))
    assert mirror.close(30) == ""
    assert 1 in arrived and steps(remote) == [2]
    assert not capsys.readouterr().err


def test_damaged_local_checkpoint_is_not_uploaded(tmp_path, remote, capsys):
    run = Run(tmp_path / "run")
    run.save(1)
    path = run.save(2)
    data = bytearray((path / "actor" / "__0_0.distcp").read_bytes())
    data[7] ^= 1
    (path / "actor" / "__0_0.distcp").write_bytes(data)
    assert run.mirror().close(30) == ""
    assert steps(remote) == [1]
    assert "step_000002 is not uploaded" in capsys.readouterr().err


def test_files_that_did_not_change_are_uploaded_once(tmp_path, remote):
    run = Run(tmp_path / "run")
    (run.folder / "samples").mkdir()
    for step in range(70):
        (run.folder / "samples" / f"step_{step:06d}.jsonl").write_text(f"{step}\n")
    run.save(1)
    assert run.mirror().close(30) == ""
    assert len([p for p in remote.puts if "/samples/" in p]) == 70
    remote.puts.clear()
    run.save(2)
    assert run.mirror().close(30) == ""
    names = {p.removeprefix(f"{ROOT}/") for p in remote.puts if "/checkpoints/" not in p}
    assert names == {"metrics.jsonl"}


def test_run_that_ends_well_but_is_not_uploaded_has_its_own_exit_code(tmp_path, remote, capsys):
    run, release = Run(tmp_path / "run"), threading.Event()
    remote.before.append(hanging_until(release))
    with pytest.raises(MirrorIncomplete) as error, mirroring(run.folder, URL, 0.1, QUICK):
        run.save(1)
    assert error.value.exit_code == 3
    # Another error is not replaced.
    with pytest.raises(ZeroDivisionError), mirroring(run.folder, URL, 0.1, QUICK):
        raise ZeroDivisionError
    release.set()
    assert "is incomplete" in capsys.readouterr().err


def test_url_without_a_run_is_one_message(tmp_path, remote):
    with pytest.raises(UserError, match=f"runner.resume={URL} has no complete checkpoint"):
        fetch_run(URL, tmp_path / "run", "checkpoints")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_resume_from_one_checkpoint_of_the_runs_own(tmp_path, remote):
    run = Run(tmp_path / "run", keep=3)
    for step in (1, 2, 3):
        run.save(step)
    assert run.mirror().close(30) == ""
    how = fetch_run(f"{URL}/checkpoints/step_000002", run.folder, "checkpoints")
    assert how == str(run.store.path(2))
    found = run.store.resume(how)
    assert found is not None and found.step == 2
    # In an empty folder it is the only one.
    assert fetch_run(f"{URL}/checkpoints/step_000001", tmp_path / "b", "checkpoints") == "auto"
    assert CheckpointStore(tmp_path / "b" / "checkpoints", keep=1).steps() == [1]
