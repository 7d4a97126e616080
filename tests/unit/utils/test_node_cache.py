import errno
import fcntl
import io
import math
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from rlmath.errors import UserError
from rlmath.utils import node_cache
from rlmath.utils.array_file import BrokenFile, read_arrays, read_header, write_arrays
from rlmath.utils.run_lock import LOCK_FILE, only_run_in


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    """Its files are run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = node_cache.node_cache()
    assert root.parent == tmp_path and node_cache.node_cache() == root
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="TMPDIR"):
        node_cache.node_cache()
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="TMPDIR"):
        node_cache.node_cache()


def test_compiled_kernels_are_shared_between_engines(tmp_path):
    mine, theirs, archive = (tmp_path / name for name in ("mine", "theirs", "archive.tar"))
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / node_cache.LOCK).touch()
    node_cache.save(mine, archive)
    assert not archive.exists()  # Nothing is compiled yet.
    (mine / "inductor").mkdir()
    (mine / "inductor" / "graph").write_text("compiled")
    node_cache.save(mine, archive)
    node_cache.seed(theirs, archive)
    assert (theirs / "inductor" / "graph").read_text() == "compiled"
    # A folder that has something already is left alone; a newer file makes a new archive.
    (mine / "triton").mkdir()
    (mine / "triton" / "kernel").write_text("new")
    os.utime(mine / "triton" / "kernel", (2e9, 2e9))
    node_cache.save(mine, archive)
    node_cache.seed(theirs, archive)
    assert not (theirs / "triton").exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["archive.tar", "mine", "theirs"]


def test_half_an_archive_costs_a_compilation_and_nothing_else(tmp_path):
    folder, archive = tmp_path / "folder", tmp_path / "archive.tar"
    folder.mkdir()
    archive.write_bytes(b"half" * 200)
    node_cache.seed(folder, archive)
    assert list(folder.iterdir()) == []


ARRAYS = {
    "tokens": np.random.default_rng(0).integers(0, 2**17, 5000, np.int32),
    "log_probs": np.array([-0.0, math.nan, -math.inf, 1e-45, -3.5], np.float32),
    "nan_bits": np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32),
    "lengths": np.array([1, 2**40, -1], np.int64),
    "mask": np.random.default_rng(1).random(77) < 0.5,
    "table": np.arange(12, dtype=np.float32).reshape(4, 3),
    "no_columns": np.empty((4, 0), np.float32),
    "empty": np.empty(0, np.int32),
    "nobody": np.empty(0, np.bool_),
    "swapped": np.array([1, 2], ">i4"),
}


def write(path, **header):
    with path.open("wb") as file:
        write_arrays(file, header, ARRAYS)
    return path


def test_arrays_and_header_are_read_unchanged(tmp_path):
    path = write(tmp_path / "a.bin", step=3, keys=["p/0", "\ud800"])
    header, arrays = read_arrays(path)
    assert header == {"step": 3, "keys": ["p/0", "\ud800"]}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        found = arrays[name]
        assert found.shape == array.shape and found.dtype == array.dtype.newbyteorder("=")
        assert found.tobytes() == array.astype(found.dtype).tobytes(), name
        assert found.flags.writeable
    assert read_header(path)["step"] == 3


def test_a_changed_byte_changes_nothing_or_is_noticed_and_so_is_every_cut(tmp_path):
    path = tmp_path / "a.bin"
    small = {"mask": ARRAYS["mask"], "log_probs": ARRAYS["log_probs"]}
    whole = io.BytesIO()
    write_arrays(whole, {"step": 1}, small)
    data, refused = whole.getvalue(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            header, found = read_arrays(path)
        except BrokenFile:
            refused += 1
            continue
        # The flipped bit is of a date, or of the permissions.
        assert header == {"step": 1} and found.keys() == small.keys()
        assert all(found[name].tobytes() == small[name].tobytes() for name in small)
    assert refused > len(data) // 2
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(BrokenFile):
            read_arrays(path)


def test_array_file_sizes(tmp_path):
    draw = np.random.default_rng(0)
    for array, most in (
        (np.full(100_000, 151_643, np.int32), 0.01),
        (draw.integers(0, 2**16, 100_000, np.int32), 0.67),
        (draw.integers(-(2**31), 2**31 - 1, 100_000, np.int32), 1.01),
    ):
        path = tmp_path / "a.bin"
        with path.open("wb") as file:
            write_arrays(file, {}, {"a": array})
        assert path.stat().st_size <= most * array.nbytes


HOLD = "import sys, time; from rlmath.utils.run_lock import only_run_in\n"
HOLD += "with only_run_in(sys.argv[1]): print('held', flush=True); time.sleep(60)"


def test_a_second_run_is_refused_and_a_killed_one_lets_go(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused = pytest.raises(UserError, match=rf"active there \(process {holder.pid} on ")
        with refused, only_run_in(run_dir):
            pass
        holder.send_signal(signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(UserError, match="a bad row"), only_run_in(run_dir):
            raise UserError("a bad row")
        assert not list(run_dir.iterdir())


def test_a_lock_whose_file_was_removed_while_it_was_waited_for_is_taken_again(
    tmp_path, monkeypatch
):
    """The run that held it removes it between the opening of the file and its lock."""
    lock, flock = tmp_path / LOCK_FILE, fcntl.flock

    def after_the_end_of_another(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_end_of_another)
    with only_run_in(tmp_path):
        assert f"process {os.getpid()} on" in lock.read_text()


def test_file_system_without_locks_warns_and_the_run_continues(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ran = False
    with only_run_in(tmp_path):
        ran = f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()
    said = capsys.readouterr().out
    assert ran
    assert f"runner.run_dir={tmp_path} is not locked" in said
    assert os.strerror(errno.ENOLCK) in said
    assert not list(tmp_path.iterdir())
