"""Files of samples from a separate process: the same lines, and nothing lost with it."""

import gzip
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor, read_samples, samples, write_samples
from rlmath.monitor.json_lines import LinesProcess, ProcessDied, write_lines
from rlmath.types import Group

pytestmark = pytest.mark.process

ROWS = [{"text": f"ähm \ud800 {i}", "reward": math.nan} for i in range(40)]


@pytest.fixture(scope="module")
def process():
    made = LinesProcess()
    yield made
    made.close()


def test_a_process_writes_the_bytes_that_are_written_here(process, tmp_path):
    for name in ("one.jsonl", "two.jsonl.gz"):
        write_lines(tmp_path / name, ROWS)
        process.write(tmp_path / f"by_{name}", [ROWS[:7], [], ROWS[7:]])
        here, there = (tmp_path / one for one in (name, f"by_{name}"))
        pack = gzip.decompress if name.endswith(".gz") else bytes
        assert pack(here.read_bytes()) == pack(there.read_bytes())
    assert len(list(tmp_path.iterdir())) == 4
    assert list(read_samples(tmp_path / "by_two.jsonl.gz"))[3]["reward"] is None


def test_write_error_is_raised_and_the_next_file_is_written(process, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    many = [[{"text": "x" * 100_000}]] * 40  # More than a pipe holds.
    with pytest.raises(FileExistsError, match="file"):
        process.write(tmp_path / "file" / "a.jsonl.gz", many)
    process.write(tmp_path / "b.jsonl.gz", [ROWS])
    assert len(list(read_samples(tmp_path / "b.jsonl.gz"))) == 40


def test_rows_that_fail_leave_no_half_of_a_file(tmp_path):
    def rows():
        yield ROWS
        raise ValueError("no more")

    made = LinesProcess()
    with pytest.raises(ValueError, match="no more"):
        made.write(tmp_path / "a.jsonl.gz", rows())
    assert list(tmp_path.iterdir()) == []
    made.write(tmp_path / "a.jsonl.gz", [ROWS])
    assert len(list(read_samples(tmp_path / "a.jsonl.gz"))) == 40
    made.close()


def test_a_process_that_is_killed_loses_no_file(tmp_path, group, capsys):
    made = LinesProcess()
    made.write(tmp_path / "a.jsonl.gz", [ROWS])
    assert made._process is not None
    os.kill(made._process.pid, signal.SIGKILL)
    made._process.wait()
    path = write_samples(tmp_path, 1, [group], compress_above_characters=10, process=made)
    assert "ended with code -9" in capsys.readouterr().err
    assert [row["index"] for row in read_samples(path)] == [0, 1]
    # The next file has another process.
    write_samples(tmp_path, 2, [group], compress_above_characters=10, process=made)
    assert capsys.readouterr().err == "" and made._process is not None
    made.close()
    made.close()


def test_a_driver_that_is_killed_leaves_neither_process_nor_half_a_file(tmp_path):
    program = (
        "import os, sys; from pathlib import Path\n"
        "from rlmath.monitor.json_lines import LinesProcess\n"
        "def rows():\n"
        "    yield [{'a': 1}]\n"
        "    print(made._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "made = LinesProcess()\n"
        "made.write(Path(sys.argv[1]) / 'a.jsonl.gz', rows())\n"
    )
    driver = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert driver.returncode == -signal.SIGKILL
    writer = int(driver.stdout)
    for _ in range(200):
        if not Path(f"/proc/{writer}").exists():
            break
        signal.sigtimedwait([], 0.05)
    assert not Path(f"/proc/{writer}").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_a_process_for_long_steps_alone(tmp_path, group):
    graded = group.samples[0]
    text = "x" * (samples.COMPRESS_ABOVE_CHARACTERS + 1)
    long = replace(graded, sample=replace(graded.sample, text=text))
    with open_monitor(tmp_path, RunnerConfig(), total_steps=2) as monitor:
        monitor.log_samples(1, [group])
        monitor.log_step(1, {})
        assert monitor._lines._process is None
        monitor.log_samples(2, [Group(group.problem, (long,))])
        monitor.log_step(2, {})
        assert (process := monitor._lines._process) is not None
    assert process.poll() == 0
    assert [path.name for path in sorted((tmp_path / "samples").glob("step_*.jsonl*"))] == [
        "step_000001.jsonl",
        "step_000002.jsonl.gz",
    ]


def test_the_process_says_when_it_cannot_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = LinesProcess()
    with pytest.raises(ProcessDied, match="ended with code 1"):
        made.write(Path("nowhere"), [ROWS] * 1000)
