"""A folder on an object store, through fsspec; each call has a time limit.

A file system's call may hang, and a thread cannot be ended: calls run in daemon threads, and when
one takes too long, the threads and their file system are left behind and new ones are made.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rlmath.errors import UserError
from rlmath.utils.daemon_threads import DaemonThreads

T = TypeVar("T")

# By scheme, the package that fsspec needs for it. ``memory`` is for tests.
_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "file": None,
    "local": None,
    "memory": None,
}
_FORMS = (
    "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, hf://buckets/OWNER/BUCKET/FOLDER or file:///FOLDER"
)
# Released together with fsspec, of which they need the same version.
_OF_FSSPEC = ("s3fs", "gcsfs")
_SPECIAL = set("*?[]#%\\")
_LIMIT_S = 300.0
# A slower transfer counts as hanging.
_LEAST_BYTES_PER_S = 2**20
_THREADS = 8


class RemoteError(UserError):
    """A call of a remote folder failed; the message names the file."""


class RemoteHangs(RemoteError):
    """A call of a remote folder did not return within its time limit."""


def is_url(text: str) -> bool:
    """Whether a setting names a remote folder."""
    return "://" in text


def url_problem(url: str, *, writes: bool) -> str | None:
    """The reason why a URL cannot be used, without connecting; ``None``: it can. ``writes``: a run
    is to be mirrored to it."""
    scheme, _, path = url.partition("://")
    parts = path.strip("/").split("/")
    if scheme not in _PACKAGES or "::" in url or "://" in path:
        return f"expected a folder such as {_FORMS}"
    if not path.strip("/") or ".." in parts or "" in parts or _SPECIAL & set(path):
        return f"expected a folder without .., // or any of *?[]#%\\, such as {_FORMS}"
    if scheme == "hf" and writes and parts[0] != "buckets":
        return (
            "a repository gets a commit for each file, and the hub limits commits; give a folder "
            "in a bucket, hf://buckets/OWNER/BUCKET/FOLDER"
        )
    package = _PACKAGES[scheme]
    if package is not None and importlib.util.find_spec(package) is None:
        version = importlib.metadata.version("fsspec")
        wanted = f"{package}=={version}" if package in _OF_FSSPEC else package
        return (
            f"{scheme}:// needs the package {package}, which is not installed: pip install {wanted}"
        )
    return None


class _Connection:
    """A file system and the threads that call it."""

    def __init__(self, url: str, threads: int) -> None:
        self._url = url
        self.threads = DaemonThreads(threads, "remote")
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None

    def open(self) -> tuple[Any, str]:
        """The file system, and the folder as it names it."""
        with self._lock:
            if self._opened is None:
                from fsspec.core import url_to_fs

                is_disk = self._url.startswith(("file://", "local://"))
                options = {"auto_mkdir": True} if is_disk else {}
                fs, root = url_to_fs(self._url, skip_instance_cache=True, **options)
                self._opened = fs, str(root).rstrip("/")
            return self._opened


class RemoteFolder:
    """The files below a URL, by their names relative to it.

    Args:
        limit_s: Time limit of a call, in seconds; a transfer has one more second for each MiB.
        threads: Number of files that are transferred at the same time.
    """

    def __init__(self, url: str, *, limit_s: float = _LIMIT_S, threads: int = _THREADS) -> None:
        self.url = url.rstrip("/")
        self.num_put = 0
        self._limit_s, self._count = limit_s, threads
        self._connection = _Connection(self.url, threads)

    def sizes(self, under: str = "") -> dict[str, int]:
        """Sizes in bytes of all files below a folder, by their names relative to it."""

        def find(fs: Any, root: str) -> dict[str, int]:
            folder = f"{root}/{under}" if under else root
            fs.invalidate_cache()
            try:
                found = fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            names = {name.removeprefix(folder).lstrip("/"): name for name in found}
            # A store's console makes an empty object for a folder.
            return {n: int(found[full]["size"] or 0) for n, full in names.items() if n}

        return self._one(f"{under or '.'} cannot be listed", find)

    def names(self) -> list[str]:
        def ls(fs: Any, root: str) -> list[str]:
            fs.invalidate_cache()
            try:
                found = fs.ls(root, detail=False)
            except FileNotFoundError:
                return []
            return sorted(
                {n.rstrip("/").rpartition("/")[2] for n in found if n.strip("/") != root.strip("/")}
            )

        return self._one("cannot be listed", ls)

    def read(self, name: str) -> bytes:
        """The contents of a file. Raises FileNotFoundError: it does not exist."""
        return self._one(
            f"{name} cannot be read", lambda fs, root: bytes(fs.cat_file(f"{root}/{name}"))
        )

    def write(self, name: str, data: bytes) -> None:
        self._one(
            f"{name} cannot be written", lambda fs, root: fs.pipe_file(f"{root}/{name}", data)
        )

    def put(self, files: Mapping[str, Path], arrived: Callable[[str], object]) -> None:
        """Upload files, several at the same time; a failure does not stop the others. ``arrived``:
        called with the name of each that was uploaded, by several threads."""

        def call(name: str, path: Path) -> Callable[[Any, str], None]:
            def put(fs: Any, root: str) -> None:
                fs.put_file(str(path), f"{root}/{name}")
                self.num_put += 1
                arrived(name)

            return put

        self._each(
            (f"{name} cannot be uploaded", call(name, path), path.stat().st_size)
            for name, path in files.items()
        )

    def get(self, files: Mapping[str, int], into: Path, under: str = "") -> None:
        """Download files, several at the same time. ``files``: sizes in bytes by name, relative to
        ``under``. Raises FileNotFoundError: one does not exist; RemoteError: one failed, or its
        name leads out of ``into``."""

        def call(name: str) -> Callable[[Any, str], None]:
            target = into / name
            source = f"{under}/{name}" if under else name

            def get(fs: Any, root: str) -> None:
                try:
                    fs.get_file(f"{root}/{source}", str(target))
                except FileNotFoundError:
                    raise FileNotFoundError(source) from None

            return get

        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise RemoteError(f"{self.url}: the name {name!r} leads out of the folder")
            (into / name).parent.mkdir(parents=True, exist_ok=True)
        self._each((f"{n} cannot be downloaded", call(n), size) for n, size in files.items())

    def delete_file(self, name: str) -> None:
        def rm(fs: Any, root: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{name}")

        self._one(f"{name} cannot be deleted", rm)

    def delete_folder(self, name: str) -> None:
        def rm(fs: Any, root: str) -> None:
            fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                fs.rm(f"{root}/{name}", recursive=True)

        self._one(f"{name} cannot be deleted", rm)

    def _one(self, what: str, do: Callable[[Any, str], T]) -> T:
        return self._result(what, self._begin(do))

    def _each(self, calls: Iterable[tuple[str, Callable[[Any, str], None], int]]) -> None:
        """Make calls at the same time, to the end of all, and raise the first error."""
        begun = [(what, self._begin(do), num_bytes) for what, do, num_bytes in calls]
        failed: Exception | None = None
        for what, future, num_bytes in begun:
            try:
                self._result(what, future, num_bytes)
            except RemoteHangs:
                raise
            except (RemoteError, FileNotFoundError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _begin(self, do: Callable[[Any, str], T]) -> Future[T]:
        connection = self._connection
        return connection.threads.submit(lambda: do(*connection.open()))

    def _result(self, what: str, future: Future[T], num_bytes: int = 0) -> T:
        limit_s = self._limit_s + num_bytes / _LEAST_BYTES_PER_S
        try:
            return future.result(limit_s)
        except FileNotFoundError:
            raise
        except Exception as error:
            if not future.done():
                self._connection.threads.close()
                self._connection = _Connection(self.url, self._count)
                raise RemoteHangs(f"{self.url}: {what}: no answer for {limit_s:g} s") from None
            said = str(error).strip().split("\n")[0]
            raise RemoteError(f"{self.url}: {what}: {type(error).__name__}: {said}") from error
