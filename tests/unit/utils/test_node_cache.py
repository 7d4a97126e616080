"""Compiled code on a node's own disk, and the archive that other nodes begin with."""

import os
import tempfile

import pytest

from rlmath.utils import node_cache


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


def test_what_one_engine_compiled_is_there_for_others(tmp_path):
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
