"""A run of the console command that tests break on purpose, in processes that they can find."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.e2e.runs import ROOT, environment, marked_processes

FIND_TIMEOUT_S = 240.0
# Ray's processes may look for their dead head for 10 s (rlmath/cluster/session.py) before they end.
END_TIMEOUT_S = 30.0


class Run:
    """``rlmath train`` in a process of its own.

    Args:
        settings: Of the run.
        log: File for its output, stdout and stderr.
    """

    def __init__(self, settings: Sequence[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        self.shared_memory = set(os.listdir("/dev/shm"))
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlmath", "train", *settings],
                cwd=ROOT,
                env=environment(self.mark),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, happens: Callable[[], bool], what: str) -> None:
        """Wait for something while the run goes on."""
        deadline = time.monotonic() + FIND_TIMEOUT_S
        while not happens():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output()[-4000:]}"
            time.sleep(0.01)

    def until_step(self, step: int) -> None:
        """Wait until a step is written down."""
        path = next(
            Path(s.split("=")[1]) for s in self.settings() if s.startswith("runner.run_dir=")
        )
        file = path / "metrics.jsonl"
        self.until(lambda: file.exists() and f'"step": {step},' in file.read_text(), f"step {step}")

    def settings(self) -> list[str]:
        return [str(argument) for argument in self.process.args]  # type: ignore[union-attr]

    def find(self, call: str) -> int:
        """The process that does ``Class.method`` now; Ray names its processes so."""
        found: list[int] = []

        def there() -> bool:
            for process in psutil.process_iter(["cmdline", "pid"]):
                if (process.info["cmdline"] or [""])[0].startswith(f"ray::{call}"):
                    try:
                        if process.environ().get("RLMATH_TEST_RUN") == self.mark:
                            found.append(process.info["pid"])
                            return True
                    except psutil.Error:
                        continue
            return False

        self.until(there, call)
        return found[0]

    def send(self, number: signal.Signals, call: str) -> int:
        """Send a signal to the process that does ``call``, as soon as one does."""
        pid = self.find(call)
        os.kill(pid, number)
        return pid

    def wait(self, timeout_s: float = 400.0) -> int:
        return self.process.wait(timeout=timeout_s)

    def listening(self) -> set[str]:
        """Addresses on which its processes listen."""
        found: set[str] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RLMATH_TEST_RUN") == self.mark:
                    sockets = process.net_connections("inet")
                    found |= {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
        return found

    def assert_nothing_left(self) -> None:
        """No process and no shared memory, within seconds."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left after {END_TIMEOUT_S:g} s: {left}"
        new = set(os.listdir("/dev/shm")) - self.shared_memory
        assert not [name for name in new if "rlmath" in name or "vllm" in name]
