"""The run in a box, on this machine: pieces travel, the list is cut, nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def packed_folder(tmp_path):
    """A folder like an environment: a program, a link, something that does not shrink."""
    folder = tmp_path / "packed"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "say"
    program.write_text("#!/bin/sh\necho said $1\n")
    program.chmod(0o755)
    (folder / "link").symlink_to("bin/say")
    (folder / "weights").write_bytes(os.urandom(3 * 2**20))
    (folder / "large.unused").write_bytes(b"x")
    return folder


def gpu_run(store, *arguments):
    return subprocess.run(
        ["bash", "launchers/gpu_run.sh", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "RLMATH_BOX": str(store)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def made_box(store, packed, tmp_path):
    box = tmp_path / "box"
    done = gpu_run(
        store, "prepare", box, "--pack", packed, "--without", "*.unused", "--piece-mib", "1"
    )
    assert done.returncode == 0, done.stderr
    return box


def items(tmp_path, *listed):
    path = tmp_path / "items.json"
    path.write_text(
        json.dumps([{"name": n, "limit_s": limit, "command": c} for n, limit, c in listed])
    )
    return path


def result(out, folder):
    found = json.loads((out / folder / "result.json").read_text())
    return found


def test_pieces_come_in_any_order_and_changed_ones_are_refused(store, packed_folder, tmp_path):
    box = made_box(store, packed_folder, tmp_path)
    pieces = sorted(box.glob("piece_*"))
    assert len(pieces) == 4
    assert all(piece.stat().st_size <= 2**20 for piece in pieces)
    first = gpu_run(store, "receive", pieces[2])
    assert first.returncode == 2 and "has no manifest.json" in first.stderr
    came = gpu_run(store, "receive", pieces[2], box / "manifest.json")
    assert came.stdout == "3 pieces to come, next piece_0000\n"
    torn = tmp_path / "piece_0001"
    torn.write_bytes(pieces[1].read_bytes()[:-1])
    refused = gpu_run(store, "receive", torn)
    assert refused.returncode == 2 and "arrived changed" in refused.stderr
    out = tmp_path / "out"
    early = gpu_run(store, "run", out, "--limit-s", "60", "--items", items(tmp_path))
    assert early.returncode == 2
    assert "3 pieces are missing: piece_0000, piece_0001, piece_0003" in early.stderr
    assert gpu_run(store, "receive", *pieces).stdout == "complete\n"
    weights = (packed_folder / "weights").read_bytes()
    shutil.rmtree(packed_folder)
    listed = items(tmp_path, ("say", 20, f"{packed_folder}/link it"))
    done = gpu_run(store, "run", out, "--limit-s", "60", "--items", listed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(out, "00_say")["tail"] == "said it\n"
    assert (packed_folder / "weights").read_bytes() == weights
    assert not (packed_folder / "large.unused").exists()


def test_an_item_beyond_its_limit_is_interrupted_and_the_next_one_runs(store, tmp_path):
    out = tmp_path / "out"
    # Its child ends with it; files that it leaves when it is told to end are kept.
    slow = "trap 'echo saved; exit 0' TERM; sleep 300 & echo $! > {out}/child; wait"
    listed = items(tmp_path, ("slow", 4, slow), ("bad", 20, "echo why; exit 3"))
    done = gpu_run(store, "run", out, "--limit-s", "60", "--items", listed)
    assert done.returncode == 1
    assert result(out, "00_slow")["rc"] == 124
    assert result(out, "00_slow")["tail"] == "saved\n"
    assert result(out, "01_bad")["rc"] == 3
    child = Path("/proc", (out / "00_slow" / "child").read_text().strip(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"
    page = gpu_run(store, "collect", out).stdout
    assert "| `slow` | ended at its limit of 4 s |" in page
    assert "| `bad` | failed (3) |" in page
    assert "End of `bad`:\n\n    why" in page


def test_items_after_a_lost_machine_run_later(store, tmp_path):
    out = tmp_path / "out"
    metrics = [
        {"step": 0, "eval/accuracy": 0.1, "eval/accuracy_standard_error": 0.01},
        {"step": 1, "timing/step": 9.0, "alignment/mean_exp_abs_diff": 1.01},
        {
            "step": 2,
            "timing/step": 2.0,
            "alignment/mean_exp_abs_diff": 1.002,
            "eval/accuracy": 0.25,
            "eval/accuracy_standard_error": 0.02,
        },
    ]
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in metrics))
    train = f"mkdir -p {{out}}/run && cp {lines} {{out}}/run/"
    listed = items(
        tmp_path, ("train", 30, train), ("long", 90, "touch {out}/began; sleep $(cat {out}/s)")
    )
    (out / "01_long").mkdir(parents=True)
    (out / "01_long" / "s").write_text("60")
    process = subprocess.Popen(
        ["bash", "launchers/gpu_run.sh", "run", out, "--limit-s", "100", "--items", listed],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "RLMATH_BOX": str(store)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "01_long" / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    page = gpu_run(store, "collect", out).stdout
    assert "| `long` | cut while it ran |" in page
    assert (
        "2 steps; held-out 0.100 ± 0.010 → 0.250 ± 0.020; 2.0 s a step; "
        "mean exp\\|Δ\\| 1.0100 |" in page
    )
    before = (out / "00_train" / "result.json").stat().st_mtime_ns
    (out / "01_long" / "s").write_text("0")
    done = gpu_run(store, "run", out, "--limit-s", "60", "--items", listed)
    assert done.returncode == 0
    assert (out / "00_train" / "result.json").stat().st_mtime_ns == before
    assert "| `long` | passed |" in gpu_run(store, "collect", out).stdout


def test_of_an_item_that_trains_twice_the_last_run_comes_back(store, tmp_path):
    sft, lines = ({"step": i, "timing/step": 9.0} for i in (1, 2)), tmp_path / "metrics.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in sft))
    first = f"mkdir -p {{out}}/start/sft_log && cp {lines} {{out}}/start/sft_log/"
    row = '{{"step":1,"timing/step":2.0,"alignment/mean_exp_abs_diff":1.25}}'
    last = f"mkdir {{out}}/run && for i in 1 2 3; do echo '{row}'; done > {{out}}/run/metrics.jsonl"
    listed = items(tmp_path, ("both", 30, f"{first} && {last}"), ("sft", 30, first))
    out = tmp_path / "out"
    done = gpu_run(store, "run", out, "--limit-s", "60", "--items", listed)
    assert done.returncode == 0, done.stdout
    assert (out / "00_both" / "metrics.jsonl").read_text().count("alignment") == 3
    page = gpu_run(store, "collect", out).stdout
    assert "3 steps; 2.0 s a step; mean exp\\|Δ\\| 1.2500 |" in page
    assert "2 steps; 9.0 s a step |" in page


def test_what_an_item_writes_in_its_own_folder_stays_and_is_collected(store, tmp_path):
    rise = {"before": 0.2, "after": 0.25, "standard_error": 0.012}
    own = {"sft/0": {"wall_s": 1}, "grpo/0": {"curve": [{"step": 40}], "rise": {"mawps": rise}}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    command = f"cp {tmp_path}/own.json {{out}}/results.json && mkdir {{out}}/evaluation && "
    command += 'echo \'{{"model": "enterprise"}}\' > {out}/evaluation/results.json'
    out = tmp_path / "out"
    listed = items(tmp_path, ("seeds", 30, command))
    assert gpu_run(store, "run", out, "--limit-s", "60", "--items", listed).returncode == 0
    page = gpu_run(store, "collect", out).stdout
    assert "| grpo/0, step 40: mawps 0.200 → 0.250 ± 0.012 |" in page


def test_items_do_not_start_without_time_left(store, tmp_path):
    out = tmp_path / "out"
    done = gpu_run(
        store, "run", out, "--limit-s", "5", "--items", items(tmp_path, ("a", 9, "true"))
    )
    assert done.returncode == 1
    assert done.stdout.startswith("a: not run, ")
    assert not (out / "00_a").exists()
