"""A run of the console command that tests break on purpose, in processes that they can find."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from rlmath.checkpoint import CheckpointStore
from tests.e2e.runs import ROOT, environment, marked_processes, metrics, quickstart_settings

# On a busy machine, engines alone have taken 140 s to start.
FIND_TIMEOUT_S = 600.0
END_TIMEOUT_S = 10.0
REWARD = f"reward.items=[{{name:'{Path(__file__).parent / 'rewards_for_tests.py'}:letters'}}]"
LAST_STEP = 8


def settings_of(material, run_dir):
    """Settings of runs that have gradients and that somebody ends after step 8: no other rate
    depends on where a run was to end."""
    return [
        *quickstart_settings(material, run_dir),
        REWARD,
        "eval.every=3",
        "runner.steps=1000",
        "runner.save_every=1",
        "runner.keep_checkpoints=9",
        "runner.resume=auto",
    ]


class Run:
    """``rlmath train`` in its own process group.

    Args:
        run_dir: Its folder.
        settings: Settings of the run, ``runner.run_dir`` among them.
        log: File for its output, stdout and stderr.
    """

    started: ClassVar[list[Run]] = []

    def __init__(self, run_dir, settings, log):
        self.mark = uuid.uuid4().hex
        self.run_dir, self.log = run_dir, log
        # Shared memory mapped by all its processes when it was told to end.
        self.shared_memory: set[str] = set()
        # All that it had started when it was told to end. Graders do not carry the mark.
        self.family: list[psutil.Process] = []
        self.started.append(self)
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlmath", "train", *settings],
                cwd=ROOT,
                env=environment(self.mark),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self):
        return self.log.read_text(errors="replace")

    def until(self, happens, what):
        """Wait for something while the run continues."""
        deadline = time.monotonic() + FIND_TIMEOUT_S
        while not happens():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.process.kill()
                why = "it ended" if ended else f"{FIND_TIMEOUT_S:g} s passed"
                pytest.fail(f"{why} before {what}:\n{self.output()[-4000:]}")
            time.sleep(0.01)

    def until_step(self, step):
        """Wait until a step is written down."""
        file = self.run_dir / "metrics.jsonl"
        self.until(lambda: file.exists() and f'"step": {step},' in file.read_text(), f"step {step}")

    def until_saved(self, step):
        """Wait until there is a checkpoint of a step."""
        folder = self.run_dir / "checkpoints" / f"step_{step:06d}"
        self.until(folder.exists, f"checkpoint of step {step}")

    def find(self, call):
        """The process that does ``Class.method`` now; Ray names its processes so."""
        found = []
        candidates = []
        looked_s = -math.inf

        def there():
            nonlocal candidates, looked_s
            # Calls are short: those few processes are looked at often, all of them seldom.
            if time.monotonic() - looked_s > 1.0:
                family = psutil.Process(self.process.pid).children(recursive=True)
                name = f"ray::{call.split('.')[0]}"
                candidates = [one for one in family if title(one).startswith(name)]
                looked_s = time.monotonic()
            found.extend(one.pid for one in candidates if title(one).startswith(f"ray::{call}"))
            return bool(found)

        self.until(there, call)
        return found[0]

    def send(self, number, call):
        """Send a signal to the process that does ``call``, as soon as one does."""
        pid = self.find(call)
        os.kill(pid, number)
        return pid

    def kill_graders(self):
        """Kill the grading processes as soon as there are any (an answer must need one); they are
        stopped first, so that they have work in their hands."""
        graders = []

        def there():
            family = psutil.Process(self.process.pid).children(recursive=True)
            servers = [one for one in family if "rlmath.grading.forkserver" in " ".join(words(one))]
            with contextlib.suppress(psutil.Error):
                graders.extend(child for one in servers for child in one.children())
            return bool(graders)

        self.until(there, "a grading process")
        for one in graders:
            one.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        for one in graders:
            one.kill()

    def listening(self):
        """Addresses on which its processes listen."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RLMATH_TEST_RUN") == self.mark:
                    sockets = process.net_connections("inet")
                    found |= {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
        return found

    def end(self, number, to="driver"):
        """End it by a signal, and see that it leaves nothing within seconds.

        Args:
            number: The signal.
            to: To the driver alone, or to its process group, as a terminal sends it.

        Returns:
            Its exit code.
        """
        self._look_at_family()
        assert self.shared_memory
        if to == "group":
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        began = time.monotonic()
        code = self.process.wait(timeout=60)
        self.assert_nothing_left(began)
        return code

    def wait_for_end(self):
        """Wait until it has ended alone, and see that it leaves nothing.

        Returns:
            Its exit code.
        """
        self._look_at_family()
        code = self.process.wait(timeout=FIND_TIMEOUT_S)
        self.assert_nothing_left()
        return code

    def assert_nothing_left(self, since_s=None):
        """No process and no shared memory, ``END_TIMEOUT_S`` after a time (now)."""
        since_s = time.monotonic() if since_s is None else since_s
        while (left := self._leftovers()) and time.monotonic() - since_s < END_TIMEOUT_S:
            time.sleep(0.1)
        assert not left, f"left after {time.monotonic() - since_s:.1f} s: {left}"
        assert not [path for path in sorted(self.shared_memory) if os.path.exists(path)]

    def _look_at_family(self):
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        for one in [self.process.pid, *(process.pid for process in self.family)]:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{one}/maps").read_text()
                # Most are "(deleted)": whoever needs them has opened them.
                self.shared_memory |= set(re.findall(r"/dev/shm/[^ \n]+", maps))

    def _leftovers(self):
        left = marked_processes(self.mark)
        for one in self.family:
            with contextlib.suppress(psutil.Error):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{one.pid} {' '.join(one.cmdline())}")
        return left


def words(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline() or [""]
    return [""]


def title(process):
    return words(process)[0]


def damage(checkpoint, how):
    """Break the file of a rank's tensors. Returns what a resume says of it."""
    shard = next(checkpoint.glob("actor/__*.distcp"))
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        if how == "truncate":
            file.truncate(size // 2)
            return f"actor/{shard.name} has {size // 2} bytes instead of {size}"
        file.seek(size // 2)
        byte = file.read(1)[0]
        file.seek(size // 2)
        file.write(bytes([byte ^ 1]))
    return f"actor/{shard.name}: its checksum differs"


def assert_says_what_it_saved(run):
    """After a signal: the last step is saved, or the run says why it is not."""
    last = metrics(run.run_dir)[-1]["step"]
    assert (run.run_dir / "curves.png").is_file(), "an interrupted run has its curves"
    newest = CheckpointStore(run.run_dir / "checkpoints", keep=1).newest_complete()
    assert not newest.skipped
    found = re.search(r"interrupted(; saved after| in the update of) step (\d+)", run.output())
    assert found, run.output()[-2000:]
    how, step = found[1], int(found[2])
    if how == "; saved after":
        assert newest.path is not None and newest.path.name == f"step_{step:06d}"
        assert step == last
    else:
        # A step whose metrics are being written down is not yet done.
        assert step in (last, last + 1)
