"""A child process writes a rank's file as the rank itself would."""

import gc
import json
import os
import subprocess
import sys
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rlmath.checkpoint import child_writer
from rlmath.checkpoint.child_writer import ChildWriter
from rlmath.checkpoint.digests import take_note
from rlmath.checkpoint.state import begin_saves
from rlmath.checkpoint.writer import checkpoint_writer
from rlmath.device.host_memory import host_copies
from tests.unit.checkpoint.small_disk import small_disk

pytestmark = pytest.mark.process


def shared_state():
    """Tensors of several types and strides in shared memory, and something that is no tensor."""
    sources = [
        torch.randn(400_000),
        torch.arange(5),
        torch.randn(300, 300).bfloat16(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
    ]
    child = ChildWriter(sources)
    copies = list(host_copies(sources, child.memory.empty))
    for source, copy in zip(sources, copies, strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
    state = {f"tensor {number}": copy for number, copy in enumerate(copies)}
    state["view"] = copies[2].t()[1::2]
    return {**state, "text": {"a": 1}}, child


def save(state, folder, child):
    """Write a state; the content of its file."""
    dcp.save(state, storage_writer=checkpoint_writer(folder, child), no_dist=True)
    (path,) = folder.glob("*.distcp")
    note = take_note(path)
    assert note is not None and note[0] == path.stat().st_size
    return path.read_bytes()


def test_a_child_writes_the_same_bytes_and_results(tmp_path):
    state, child = shared_state()
    tensors = {name: value for name, value in state.items() if name != "text"}
    assert save(tensors, tmp_path / "1", child) == save(tensors, tmp_path / "2", None)
    state, child = shared_state()
    save(state, tmp_path / "child", child)
    read = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"a": 0}
        for name, value in state.items()
    }
    dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path / "child"), no_dist=True)
    for name, value in state.items():
        same = torch.equal(read[name], value) if name != "text" else read[name] == value
        assert same, name


def test_a_full_disk_is_reported_by_the_child(tmp_path):
    state, child = shared_state()
    with (
        small_disk(tmp_path / "small", size_kib=512) as folder,
        pytest.raises(CheckpointException, match="no space left on device"),
    ):
        save(state, folder / "actor", child)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9, as when memory runs out"),
        ("raise SystemExit(3)", "ended with status 3; its log has the error"),
    ],
)
def test_a_child_that_ends_early_fails_the_save(tmp_path, monkeypatch, program, says):
    monkeypatch.setattr(child_writer, "_PROGRAM", program)
    state, child = shared_state()
    with pytest.raises(CheckpointException, match=says):
        save(state, tmp_path, child)


def test_a_tensor_outside_the_shared_memory_is_refused(tmp_path):
    state, child = shared_state()
    with pytest.raises(CheckpointException, match=r"shape \(2, 3\) is not in shared memory"):
        save({**state, "other": torch.ones(2, 3)}, tmp_path, child)


def test_a_child_whose_rank_is_gone_ends():
    paths = json.dumps([path for path in sys.path if path])
    program = [sys.executable, "-s", "-P", "-c", child_writer._PROGRAM, paths, "0", "0", "1"]
    assert subprocess.run([*program, str(os.getppid())], timeout=120).returncode == -9


def test_a_child_that_is_not_needed_ends():
    child = ChildWriter([torch.ones(3)])
    process = child._process
    del child
    gc.collect()
    assert process.wait(120) == 0


def test_the_copies_are_freed_when_they_are_written(monkeypatch, tmp_path):
    class Copies:
        def write(self):
            pass

    copies = Copies()
    alive, writes = weakref.ref(copies), [copies.write]
    monkeypatch.setattr("rlmath.checkpoint.state._last", None)
    monkeypatch.setattr("rlmath.checkpoint.state.free_group", lambda: None)
    monkeypatch.setattr("rlmath.checkpoint.state._prepare_save", lambda *_, **__: writes.pop())
    pending = begin_saves({"actor": Mock()}, tmp_path)
    del copies
    pending.result()
    gc.collect()
    assert alive() is None
