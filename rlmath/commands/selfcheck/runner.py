"""Runs a check in its own process, ends it at its time limit, and ends all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlmath.cluster.logs import end_of
from rlmath.cluster.watchdog import DUMP_WAIT_S, STACKS_SIGNAL
from rlmath.commands.selfcheck.catalog import Check
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Outcome, Record, phase_words, read_outcome
from rlmath.commands.selfcheck.worker import LOG_FILE, RECORD_FILE
from rlmath.device.nvidia import gpu_states

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_S = 10.0
# The driver takes a moment to free the memory of processes that were killed.
MEMORY_WAIT_S = 30.0
# Memory that may stay in use on a GPU after a check: others' contexts come and go.
MEMORY_LEFT_MIB = 256


@dataclass(frozen=True)
class Result:
    check: Check
    outcome: Outcome  # Its report, and how its process ended.
    seconds: float
    log_tail: str  # End of its output when it failed, else "".


@contextlib.contextmanager
def adopting_child_processes() -> Iterator[None]:
    """Become the parent of every process whose own parent ends, so that none can escape."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_check(check: Check, node: Node) -> Result:
    """Run a check to its end or its limit. Nothing that it started is left when this returns.
    ``node``: with the check's own folder, which is made; what an earlier run left in it is removed.
    """
    folder = Path(node.folder)
    record_path = folder / RECORD_FILE
    if record_path.is_file():
        # An earlier one's: a run would resume it, or refuse to.
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record_path.touch()
    used_before = _used_mib()
    others = _descendants()
    started_s = time.monotonic()
    about = json.dumps(dataclasses.asdict(node))
    with open(folder / LOG_FILE, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", check.target, about],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "0"},
        )
    timed_out = False
    try:
        process.wait(check.limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(STACKS_SIGNAL)
        time.sleep(DUMP_WAIT_S)
    finally:
        _end(process, others)
    seconds = time.monotonic() - started_s
    record = Record(record_path)
    _report_end(record, read_outcome(record_path), process.returncode, timed_out, check)
    _report_memory(record, used_before)
    outcome = read_outcome(record_path)
    tail = end_of(str(folder / LOG_FILE)).strip() if outcome.status == "failed" else ""
    return Result(check, outcome, seconds, tail)


def _report_end(
    record: Record, outcome: Outcome, returncode: int, timed_out: bool, check: Check
) -> None:
    """Say why a check's process ended before the check did."""
    where = phase_words(outcome.open_phases)
    if timed_out:
        record.fail(
            f"did not end within {check.limit_s:g} s{where}; it was ended, and its log has the "
            "stacks of its threads"
        )
    elif returncode < 0:
        name = signal.Signals(-returncode).name
        record.fail(f"its process was ended by {name}{where}")
    elif not outcome.ended:
        record.fail(f"its process ended with exit code {returncode}{where}")


def _report_memory(record: Record, before: dict[str, int]) -> None:
    """Wait until the GPUs are as free as before the check."""
    deadline = time.monotonic() + MEMORY_WAIT_S
    while True:
        left = {
            uuid: used - before.get(uuid, 0)
            for uuid, used in _used_mib().items()
            if used - before.get(uuid, 0) > MEMORY_LEFT_MIB
        }
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    for uuid, mib in left.items():
        record.fail(
            f"{mib} MiB of {uuid} are still in use {MEMORY_WAIT_S:g} s after the check's processes "
            "ended",
            "Look for processes that are left with nvidia-smi; the next checks may lack memory.",
        )


def _used_mib() -> dict[str, int]:
    return {state.uuid: state.used_mib for state in gpu_states()}


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(process: subprocess.Popen[bytes], others: set[psutil.Process]) -> None:
    """End the check's process group, and whatever else has been started since ``others``.

    Ray's processes and vLLM's workers lead their own groups and sessions; as this process
    adopts child processes whose parent has ended, all of them are below it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILL_WAIT_S
    while left := _descendants() - others:
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=1.0)
        if time.monotonic() > deadline:
            break
