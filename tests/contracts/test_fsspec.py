"""Methods of fsspec and of its file systems that rlmath/checkpoint/remote.py calls."""

import importlib.metadata
import inspect

import fsspec
import pytest
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from huggingface_hub import HfFileSystem

from rlmath.checkpoint.remote import _OF_FSSPEC, _PACKAGES

METHODS = (
    *("find", "ls", "cat_file", "pipe_file", "put_file", "get_file", "rm_file", "rm"),
    "invalidate_cache",
)


def test_schemes_and_their_packages():
    for scheme, package in _PACKAGES.items():
        module = known_implementations[scheme]["class"].partition(".")[0]
        assert module == (package or "fsspec")
    assert set(_OF_FSSPEC) < set(_PACKAGES.values())
    # s3fs and gcsfs have fsspec's number, which is a date.
    assert int(importlib.metadata.version("fsspec").split(".")[0]) >= 2026


@pytest.mark.parametrize("kind", [fsspec.AbstractFileSystem, HfFileSystem])
def test_file_systems_have_what_is_called(kind):
    assert all(callable(getattr(kind, name)) for name in METHODS)
    assert "detail" in inspect.signature(kind.find).parameters
    assert "recursive" in inspect.signature(kind.rm).parameters


def test_a_bucket_of_the_hub_is_a_folder():
    fs, root = url_to_fs("hf://buckets/owner/bucket/runs/mine", skip_instance_cache=True)
    assert isinstance(fs, HfFileSystem) and root == "buckets/owner/bucket/runs/mine"


def test_a_new_file_system_is_made_each_time(tmp_path):
    """One that hangs is left behind."""
    url = f"file://{tmp_path}/a/b"
    one, root = url_to_fs(url, skip_instance_cache=True, auto_mkdir=True)
    assert one is not url_to_fs(url, skip_instance_cache=True, auto_mkdir=True)[0]
    one.pipe_file(f"{root}/c/d", b"x")
    assert (tmp_path / "a" / "b" / "c" / "d").read_bytes() == b"x"
