"""Running the console command as a user does: in a separate process."""

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from rlmath.cli import main

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 600
QUICKSTART_TIMEOUT_S = 1500
MEMORY_EVERY_S = 2.0
# Set for every process that a test starts, to find those that stay behind.
MARK = "RLMATH_TEST_RUN"


def environment(mark=""):
    return {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT), MARK: mark}


def python(*arguments, **options):
    return command(sys.executable, *arguments, **options)


def command(*words, mark="", timeout_s=RUN_TIMEOUT_S, folder=ROOT):
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def rlmath(*arguments, **options):
    return python("-m", "rlmath", *arguments, **options)


def command_here(*arguments):
    """Output of a command that reads a run's folder; in this process, as imports take most of its
    time."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(list(arguments))
    assert code == 0, out.getvalue()
    return out.getvalue()


def quickstart_settings(material, run_dir):
    """The quickstart's training without its SFT, on material that tests share, and small."""
    return [
        "experiment=quickstart",
        f"model.path={material / 'model'}",
        f"data.train_paths=[{material / 'data' / 'train.jsonl'}]",
        f"data.eval_paths=[{material / 'data' / 'eval.jsonl'}]",
        "data.max_eval_problems=16",
        f"runner.run_dir={run_dir}",
        "runner.steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=4",
        # Batches as they are on CUDA; tests/distributed/test_shared_prompts.py has those of auto.
        "actor.share_prompts=never",
        # Beside other runs, a second thread of a rank would spin on the core that they need.
        "actor.num_threads=1",
        "runner.check_export_sequences=8",
    ]


@dataclass(frozen=True)
class QuickstartRun:
    """A finished ``launchers/quickstart.sh``: its folder, stdout, and peak memory."""

    run_dir: Path
    output: str
    peak_gib: float


def quickstart(run_dir, *overrides):
    """Run the README's first command with overrides; it has to succeed."""
    mark = uuid.uuid4().hex
    peak_gib = 0.0
    ended = threading.Event()

    def watch():
        nonlocal peak_gib
        while not ended.wait(MEMORY_EVERY_S):
            peak_gib = max(peak_gib, marked_memory_gib(mark))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        words = ("bash", "launchers/quickstart.sh", f"runner.run_dir={run_dir}", *overrides)
        run = command(*words, mark=mark, timeout_s=QUICKSTART_TIMEOUT_S)
    finally:
        ended.set()
        watcher.join()
    assert run.returncode == 0, run.stderr
    return QuickstartRun(run_dir, run.stdout, peak_gib)


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def marked_processes(mark):
    """Command lines of the processes that carry a mark in their environment."""
    return [(p / "cmdline").read_text().replace("\0", " ") for p in _processes_with(mark)]


def marked_memory_gib(mark):
    """Memory of those processes; what several share counts once (proportional set size)."""
    kib = 0
    for process in _processes_with(mark):
        with contextlib.suppress(OSError):
            lines = (process / "smaps_rollup").read_text().splitlines()
            kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 2**20


def _processes_with(mark):
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            environ = (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environ.split(b"\0") and state != "Z":
            yield process


def check_replay(run_dir, *arguments):
    found = rlmath("replay", str(run_dir), *arguments, "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(found.stdout)
    return result
