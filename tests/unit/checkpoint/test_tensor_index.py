"""An index of tensors is read without executing anything."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from rlmath.checkpoint import BrokenCheckpoint
from rlmath.checkpoint.tensor_index import check_index


class Executes:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_an_index_of_tensors_is_taken(tmp_path):
    state = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    check_index(tmp_path)


def test_an_object_beside_tensors_is_refused(tmp_path):
    state = {"a": torch.ones(3), "b": Executes(tmp_path / "executed")}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(BrokenCheckpoint, match="b is no tensor; refused"):
        check_index(tmp_path)


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module, name, argument):
    """A pickle that calls ``module.name(argument)``, with a dotted name if need be."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        # An allowed module that has imported another.
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch", "hub.load"),
        ("torch", "load"),
    ],
)
def test_a_call_is_refused_and_not_made(tmp_path, module, name):
    executed = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(call(module, name, f"touch {executed}"))
    with pytest.raises(BrokenCheckpoint, match=rf"names {module}.{name}; refused"):
        check_index(tmp_path)
    assert not executed.exists()
    if name.endswith("system"):
        # The reason for the check: pickle itself makes the call.
        pickle.loads((tmp_path / ".metadata").read_bytes())
        assert executed.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"text", pickle.dumps({"a": 1})])
def test_invalid_tensor_index_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=r"\.metadata cannot be read"):
        check_index(tmp_path)
