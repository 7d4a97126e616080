"""A store in memory on which faults can be planted, as ``memory://``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Hook = Callable[[str], None]


class FaultyStore(MemoryFileSystem):
    """Calls ``before`` and ``after`` of each upload with the name; they may raise or damage."""

    store: ClassVar[dict[str, Any]]
    pseudo_dirs: ClassVar[list[str]]
    before: ClassVar[list[Hook]]
    after: ClassVar[list[Hook]]
    puts: ClassVar[list[str]]

    def put_file(self, lpath, rpath, **options):
        for hook in self.before:
            hook(rpath)
        super().put_file(lpath, rpath, **options)
        self.puts.append(rpath)
        for hook in self.after:
            hook(rpath)

    @classmethod
    def bytes_of(cls, url):
        """All files below a URL."""
        root = cls._strip_protocol(url) + "/"
        files = tuple(cls.store.items())
        return {k.removeprefix(root): v.getvalue() for k, v in files if k.startswith(root)}

    @classmethod
    def damage(cls, path, change):
        """Replace a file's bytes, or delete it where ``change`` returns ``None``."""
        data = change(cls.store[path].getvalue())
        del cls.store[path]
        if data is not None:
            cls().pipe_file(path, data)


@contextmanager
def faulty_store():
    """An empty one, for as long as the block runs."""
    FaultyStore.store, FaultyStore.pseudo_dirs = {}, [""]
    FaultyStore.before, FaultyStore.after, FaultyStore.puts = [], [], []
    before = fsspec.get_filesystem_class("memory")
    fsspec.register_implementation("memory", FaultyStore, clobber=True)
    try:
        yield FaultyStore
    finally:
        fsspec.register_implementation("memory", before, clobber=True)
