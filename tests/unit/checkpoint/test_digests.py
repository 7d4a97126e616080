"""Checksums that ranks note while they write are those of the files."""

import errno
import json
import os
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from rlmath.checkpoint import CheckpointStore, digests, manifest
from rlmath.checkpoint.digests import SUFFIX, hashed_stream, take_note
from rlmath.checkpoint.manifest import MANIFEST, BrokenCheckpoint, verify, write_manifest
from rlmath.checkpoint.writer import checkpoint_writer


def xxh3(path):
    return str(xxhash.xxh3_128_hexdigest(path.read_bytes()))


@pytest.fixture
def rank_file(tmp_path):
    """The file of a rank, as torch writes it: large and small tensors, views, and bytes."""
    state = {
        "large": torch.randn(400_000),
        "small": torch.arange(5),
        "view": torch.randn(300, 300).t()[::2],
        "half": torch.randn(70_000).bfloat16(),
        "text": {"a": 1},
    }
    dcp.save(state, storage_writer=checkpoint_writer(tmp_path / "actor"), no_dist=True)
    (path,) = (tmp_path / "actor").glob("*.distcp")
    return path


def test_a_rank_notes_what_it_wrote(rank_file):
    notes = sorted(path.name for path in rank_file.parent.glob(f"*{SUFFIX}"))
    assert notes == [rank_file.name + SUFFIX]  # Not of what is renamed afterwards.
    assert take_note(rank_file) == (rank_file.stat().st_size, xxh3(rank_file))
    assert take_note(rank_file) is None


def test_the_manifest_has_the_notes_and_reads_only_other_files(rank_file, monkeypatch):
    read = []
    digest = manifest.file_digest
    monkeypatch.setattr(
        manifest, "file_digest", lambda path: read.append(path.name) or digest(path)
    )
    folder = rank_file.parent.parent
    made = write_manifest(folder, 3, {})
    assert read == [".metadata"]
    assert set(made.files) == {"actor/.metadata", f"actor/{rank_file.name}"}
    assert made.files[f"actor/{rank_file.name}"] == (rank_file.stat().st_size, xxh3(rank_file))
    assert not list(folder.rglob(f"*{SUFFIX}"))
    monkeypatch.undo()
    assert verify(folder).files == made.files


def test_bytes_that_change_after_they_were_written_are_found(rank_file):
    content = bytearray(rank_file.read_bytes())
    content[len(content) // 2] ^= 1
    rank_file.write_bytes(content)
    write_manifest(rank_file.parent.parent, 3, {})
    with pytest.raises(BrokenCheckpoint, match="its checksum differs"):
        verify(rank_file.parent.parent)


def test_a_file_that_was_cut_is_refused(rank_file):
    rank_file.write_bytes(rank_file.read_bytes()[:-1])
    with pytest.raises(OSError, match=f"bytes instead of {rank_file.stat().st_size + 1}"):
        write_manifest(rank_file.parent.parent, 3, {})


def test_a_write_that_fails_leaves_no_note(tmp_path):
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
    assert take_note(path) == (100_005, xxhash.xxh3_128_hexdigest(b"y" * 100_000 + b"short"))


def test_the_disk_gets_a_large_file_in_parts_and_its_error_is_raised(tmp_path, monkeypatch):
    """The system reports a failed write to a file once, so the last fsync would not see it."""
    monkeypatch.setattr(digests, "_SYNC_BYTES", 1 << 20)
    synced = []

    def fdatasync(file):
        synced.append(os.fstat(file).st_size)
        if len(synced) == 2:
            raise OSError(errno.EIO, "the disk failed")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError, match="the disk failed"), hashed_stream(tmp_path / "a") as stream:
        for _ in range(2):
            stream.write(bytes(1 << 20))
            while stream._sync is not None and not stream._sync.done():
                time.sleep(0.001)
    assert synced[0] >= 1 << 20 and len(synced) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["a"]  # And no note beside it.


def count_checksums(monkeypatch):
    """Notes each checksum that is begun."""
    made = []
    xxh3_128 = xxhash.xxh3_128
    monkeypatch.setattr(digests.xxhash, "xxh3_128", lambda: made.append("xxh3_128") or xxh3_128())
    return made


def test_a_process_hashes_a_checkpoint_once_and_a_changed_file_again(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.begin(1)
    (folder / "a.distcp").write_bytes(b"a" * 1000)
    path = store.commit(1, {"step": 1}, {})
    monkeypatch.setattr(digests, "_computed", {})
    made = count_checksums(monkeypatch)
    # As at a restart: the supervisor looks for the newest, and the attempt resumes from it.
    assert store.newest_complete().path == path
    assert len(made) == 2
    assert store.newest_complete().path == path
    assert store.resume("auto") is not None
    assert len(made) == 2
    content = bytearray((path / "a.distcp").read_bytes())
    content[500] ^= 1
    (path / "a.distcp").write_bytes(content)
    assert store.newest_complete().path is None
    assert len(made) == 3


def test_a_file_that_may_have_changed_within_the_clocks_tick_is_hashed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**18)
    (tmp_path / "a").write_bytes(b"a")
    made = count_checksums(monkeypatch)
    assert digests.file_digest(tmp_path / "a") == digests.file_digest(tmp_path / "a")
    assert len(made) == 2


def test_ranks_verify_each_file_of_their_model_once_between_them(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.begin(1)
    for model, files in (("actor", 5), ("value_model", 2)):
        (folder / model).mkdir()
        for number in range(files):
            (folder / model / f"__{number}_0.distcp").write_bytes(bytes(1000 + number))
    path = store.commit(1, {}, {})
    monkeypatch.setattr(digests, "_computed", {})
    made = count_checksums(monkeypatch)
    for rank in range(2):
        verify(path, (rank, 2), under="actor")
    assert len(made) == 5
    flipped = path / "actor" / "__3_0.distcp"
    flipped.write_bytes(b"x" + bytes(1002))
    found = []
    for rank in range(2):
        try:
            verify(path, (rank, 2), under="actor")
        except BrokenCheckpoint as error:
            found.append(str(error))
    assert found == ["actor/__3_0.distcp: its checksum differs"]
    verify(path, under="value_model")


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    write_manifest(tmp_path, 7, {})
    content = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(content | {"format": 3}))
    with pytest.raises(BrokenCheckpoint, match="has format 3; this version reads format 2"):
        verify(tmp_path)


def test_the_writer_computes_no_checksum_of_zip(tmp_path, monkeypatch):
    """And leaves torch's option as it was, also after a failure."""
    seen = []

    def saving(*_):
        seen.append(torch.serialization.get_crc32_options())
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(torch, "save", saving)
    for is_on in (True, False):
        torch.serialization.set_crc32_options(is_on)
        try:
            with pytest.raises(CheckpointException):
                dcp.save(
                    {"a": torch.ones(3)}, storage_writer=checkpoint_writer(tmp_path), no_dist=True
                )
            assert torch.serialization.get_crc32_options() is is_on
        finally:
            torch.serialization.set_crc32_options(True)
    assert seen == [False, False]
