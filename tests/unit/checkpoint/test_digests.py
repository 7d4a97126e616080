"""Checksums that ranks note while they write are those of the files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rlmath.checkpoint import manifest
from rlmath.checkpoint.digests import SUFFIX, hashed_stream, take_note
from rlmath.checkpoint.manifest import BrokenCheckpoint, verify, write_manifest
from rlmath.checkpoint.writer import _writer


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of a rank, as torch writes it: large and small tensors, views, and bytes."""
    state: dict[str, Any] = {
        "large": torch.randn(400_000),
        "small": torch.arange(5),
        "view": torch.randn(300, 300).t()[::2],
        "half": torch.randn(70_000).bfloat16(),
        "text": {"a": 1},
    }
    dcp.save(state, storage_writer=_writer(tmp_path / "actor"), no_dist=True)
    (path,) = (tmp_path / "actor").glob("*.distcp")
    return path


def test_a_rank_notes_what_it_wrote(written: Path) -> None:
    notes = sorted(path.name for path in written.parent.glob(f"*{SUFFIX}"))
    assert notes == [written.name + SUFFIX]  # Not of what is renamed afterwards.
    assert take_note(written) == (written.stat().st_size, sha256(written))
    assert take_note(written) is None


def test_the_manifest_has_the_notes_and_reads_only_other_files(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path: read.append(path.name) or digest(path))
    folder = written.parent.parent
    made = write_manifest(folder, 3, {})
    assert read == [".metadata"]
    assert set(made.files) == {"actor/.metadata", f"actor/{written.name}"}
    assert made.files[f"actor/{written.name}"] == (written.stat().st_size, sha256(written))
    assert not list(folder.rglob(f"*{SUFFIX}"))
    assert verify(folder).files == made.files


def test_bytes_that_change_after_they_were_written_are_found(written: Path) -> None:
    content = bytearray(written.read_bytes())
    content[len(content) // 2] ^= 1
    written.write_bytes(content)
    write_manifest(written.parent.parent, 3, {})
    with pytest.raises(BrokenCheckpoint, match="its checksum differs"):
        verify(written.parent.parent)


def test_a_file_that_was_cut_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-1])
    with pytest.raises(OSError, match=f"bytes, written were {written.stat().st_size + 1}"):
        write_manifest(written.parent.parent, 3, {})


def test_a_write_that_fails_leaves_no_note(tmp_path: Path) -> None:
    path = tmp_path / "a.distcp"
    with pytest.raises(OSError, match="no room"), hashed_stream(path) as stream:
        stream.write(b"x" * 100_000)
        raise OSError("no room")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with hashed_stream(path) as stream:
        data = bytearray(b"y" * 100_000)
        assert stream.write(data) == len(data)
        data[:] = b"z" * len(data)  # What is written is not the caller's any more.
        stream.write(memoryview(b"short"))
    assert take_note(path) == (100_005, hashlib.sha256(b"y" * 100_000 + b"short").hexdigest())
