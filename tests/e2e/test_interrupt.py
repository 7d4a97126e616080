"""Ctrl-C and SIGTERM save, and end everything quickly and without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from rlmath.checkpoint import CheckpointStore
from tests.e2e.runs import (
    ROOT,
    environment,
    marked_processes,
    metrics,
    quickstart_settings,
)

END_TIMEOUT_S = 10.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_run(
    number: signal.Signals, code: int, material: Path, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    shared_memory = set(os.listdir("/dev/shm"))
    settings = quickstart_settings(material, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlmath", "train", *settings, "runner.steps=10000"],
        cwd=ROOT,
        env=environment(mark),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and " 2/10000" in line:
            break
    assert process.poll() is None, "the run ended before it was interrupted"
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # A terminal sends it to the whole foreground group.
    else:
        process.send_signal(number)
    started_s = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - started_s <= END_TIMEOUT_S
    assert process.returncode == code
    while (left := marked_processes(mark)) and time.monotonic() - started_s < END_TIMEOUT_S:
        time.sleep(0.2)
    assert not left
    ours = [n for n in set(os.listdir("/dev/shm")) - shared_memory if "rlmath" in n or "vllm" in n]
    assert not ours
    # In the update of a step nothing can be saved, and the run says so.
    last = metrics(tmp_path)[-1]["step"]
    newest = CheckpointStore(tmp_path / "checkpoints", keep=1).newest_whole().path
    if newest is None:
        assert f"interrupted in the update of step {last + 1}" in output
    else:
        assert newest.name == f"step_{last:06d}"
        assert f"interrupted; saved after step {last}" in output
