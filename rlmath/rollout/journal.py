"""Samples written to disk when an engine has made them, so that a crash of the run loses none.

``journal/step_000012.bin`` has the samples of one step, until a checkpoint covers the step. A run
that resumes before it finds them by request, if the weights are the same to the last bit, and asks
the engines only for the others. A record is its length, its CRC-32, a zlib stream (a line of JSON
and the arrays), and uncompressed routes, which hardly compress.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlmath.engines.requests import Request
from rlmath.rollout.group_state import with_tuples
from rlmath.types import ONE_TURN, Sample

FOLDER = "journal"
_FRAME = struct.Struct("<II")
_COMPRESSION = 1


class StepJournal:
    """The samples of one step: those found from an earlier start of the run, and new ones.

    Args:
        path: Path of the file; ``None``: nothing is kept or found.
        weights: Identity of the sampling weights; samples of others are not used.
        threads: Executor with one thread, which compresses and writes samples.
    """

    def __init__(self, path: Path | None, weights: str, threads: ThreadPoolExecutor | None) -> None:
        self._path, self._weights, self._threads = path, weights, threads
        self._known: dict[str, Sample] = {}
        self._file: IO[bytes] | None = None
        self._writing: list[Future[None]] = []
        self._failed: OSError | None = None
        self.reused = 0

    def open(self) -> None:
        """Read existing samples; cut off a record that was not written completely."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        end = 0
        if self._path.exists():
            end = self._read(self._path)
        self._file = self._path.open("r+b" if end else "wb")
        self._file.truncate(end)
        self._file.seek(end)

    def _read(self, path: Path) -> int:
        """Load the samples of a file; return where its last whole record ends."""
        end = 0
        for payload, after in _records(path.read_bytes()):
            key, sample = _unpack(payload)
            self._known[key] = sample
            end = after
        return end

    def close(self) -> None:
        """Wait for pending writes, and close the file."""
        writing, self._writing = self._writing, []
        for one in writing:
            one.result()
        if self._file is not None:
            with contextlib.suppress(OSError):  # Buffered data that a full disk refused.
                self._file.close()
            self._file = None
        if self._failed is not None:
            print(
                f"warning: {self._path}: {self._failed}; samples of this step are not kept; if "
                "the run dies, it generates them again (runner.journal_keep_gib)",
                file=sys.stderr,
                flush=True,
            )

    def print_reused(self, step: int) -> None:
        """Print how many samples it had."""
        if self.reused:
            print(f"step {step}: {self.reused} samples came from the journal", flush=True)

    def find(self, request: Request) -> Sample | None:
        """The sample of a request, if present; it names the engine that made it."""
        if not self._known:
            return None
        found = self._known.pop(self._key(request), None)
        if found is None:
            return None
        self.reused += 1
        if request.begun is None:
            return found
        # The begun part is in the request, and is not written again.
        tokens = np.concatenate([request.begun.token_ids, found.token_ids])
        log_probs = np.concatenate([request.begun.log_probs, found.log_probs])
        pieces = [one for one in (request.begun.routes, found.routes) if one is not None]
        routes = np.concatenate(pieces) if pieces else None
        return replace(found, token_ids=tokens, log_probs=log_probs, routes=routes)

    def keep(self, request: Request, sample: Sample) -> None:
        """Write an engine's sample for a request, unless it was cut before it had a token more."""
        if self._file is None or self._threads is None:
            return
        if has_nothing_new(request, sample):
            return
        sample = new_part(request, sample)
        self._writing.append(self._threads.submit(self._write, self._key(request), sample))

    def _write(self, key: str, sample: Sample) -> None:
        assert self._file is not None
        if self._failed is not None:
            return  # Nothing after an incomplete record is found.
        record = frame(key, sample)
        try:
            self._file.write(record)
            self._file.flush()
        except OSError as error:
            self._failed = error

    def _key(self, request: Request) -> str:
        """A digest of everything that determines a sample: request, weights, and begun part."""
        digest = hashlib.blake2b(digest_size=16)
        begun = request.begun
        plain = (
            self._weights,
            request.problem_id,
            request.index,
            request.new_tokens,
            request.max_tokens,
            request.temperature,
            request.top_p,
            request.seed,
            request.ignore_eos,
            () if begun is None else begun.spans,
        )
        digest.update(repr(plain).encode())
        digest.update(np.array(request.prompt_token_ids, np.int32).tobytes())
        if begun is not None:
            for array in (begun.token_ids, begun.log_probs):
                digest.update(np.asarray(array).tobytes())
        if request.wants_routes:
            digest.update(b"routes")
        if request.stop:
            digest.update(repr(request.stop).encode())
        if begun is not None and begun.segments != ONE_TURN:
            digest.update(repr(begun.segments).encode())
        if request.begun_routes:  # The routes of a record continue these.
            digest.update(str(request.begun_routes).encode())
        return digest.hexdigest()


class SampleJournal:
    """The journals of a run, one for each step since its last checkpoint.

    Args:
        folder: Created when there is a sample to write; ``None``: nothing is kept.
        keep_gib: Size of all files above which those of the oldest steps are removed.
    """

    def __init__(self, folder: Path | None = None, keep_gib: float = 0.0) -> None:
        self._folder = folder if keep_gib else None
        self._keep_bytes = keep_gib * 2**30
        # Sizes of the files that no process writes to any more, oldest step first.
        self._sizes: dict[Path, int] = {}
        self._total = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @contextlib.contextmanager
    def step(self, step: int, weights: str | None) -> Iterator[StepJournal]:
        """The opened journal of a step. ``weights``: identity of the weights that sample it;
        ``None``: unknown, so nothing is kept."""
        path = None
        if self._folder is not None and weights is not None:
            path = self._folder / f"step_{step:06d}.bin"
            self._limit(path)
        journal = StepJournal(path, weights or "", self._threads)
        journal.open()
        try:
            yield journal
        finally:
            journal.close()

    def drop(self, up_to: int) -> None:
        """Remove the files of steps that a checkpoint covers."""
        for path in self._files():
            if _step(path) <= up_to:
                self._remove(path)

    def forget(self, step: int) -> None:
        """Remove the samples of a step whose engines had wrong weights."""
        for path in self._files():
            if _step(path) == step:
                self._remove(path)

    def close(self) -> None:
        """End its thread."""
        self._threads.shutdown(wait=True)

    def _limit(self, newest: Path) -> None:
        # Files of earlier steps do not grow.
        for path in self._files():
            if path not in self._sizes and _step(path) < _step(newest):
                self._sizes[path] = path.stat().st_size
                self._total += self._sizes[path]
        for path in list(self._sizes):
            if self._total <= self._keep_bytes:
                return
            self._remove(path)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._total -= self._sizes.pop(path, 0)

    def _files(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob("step_*.bin"))


def _step(path: Path) -> int:
    """Step of a file ``step_000012.bin``."""
    return int(path.stem.rpartition("_")[2])


def has_nothing_new(request: Request, sample: Sample) -> bool:
    """Whether a sample was cut before it had a token more."""
    return sample.finish_reason == "cut" and len(sample.token_ids) == request.begun_tokens


def new_part(request: Request, sample: Sample) -> Sample:
    """The part of a sample that an engine added to the begun one."""
    new = slice(request.begun_tokens, None)
    return replace(
        sample,
        token_ids=np.asarray(sample.token_ids)[new],
        log_probs=np.asarray(sample.log_probs)[new],
        routes=None if sample.routes is None else sample.routes[request.begun_routes :],
    )


def frame(key: str, sample: Sample) -> bytes:
    payload = _pack(key, sample)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _pack(key: str, sample: Sample) -> bytes:
    plain: dict[str, Any] = dict(vars(sample)) | {"key": key}
    tokens = plain.pop("token_ids").astype("<i4")
    log_probs = plain.pop("log_probs").astype("<f4")
    routes = b""
    if (given := plain.pop("routes")) is not None:
        routes = given.tobytes()
        plain["routes"] = [given.dtype.str, list(given.shape)]
    # JSON's escapes hold half surrogates, which UTF-8 cannot.
    head = json.dumps(plain, separators=(",", ":")).encode("ascii") + b"\n"
    return zlib.compress(head + tokens.tobytes() + log_probs.tobytes(), _COMPRESSION) + routes


def _unpack(payload: bytes) -> tuple[str, Sample]:
    stream = zlib.decompressobj()
    head, _, arrays = stream.decompress(payload).partition(b"\n")
    plain = json.loads(head)
    key = plain.pop("key")
    if "routes" in plain:
        dtype, shape = plain["routes"]
        plain["routes"] = np.frombuffer(stream.unused_data, dtype).reshape(shape).copy()
    half = len(arrays) // 2
    plain = with_tuples(plain)
    sample = Sample(
        **plain,
        token_ids=np.frombuffer(arrays[:half], "<i4").astype(np.int32),
        log_probs=np.frombuffer(arrays[half:], "<f4").astype(np.float32),
    )
    return key, sample


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Whole payloads, each with the place where its record ends."""
    start = 0
    while start + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + length
        payload = data[start + _FRAME.size : end]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload, end
        start = end
