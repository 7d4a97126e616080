"""A run that carries samples over, killed while it samples: nothing of it is lost, or different."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import ROOT, RUN_TIMEOUT_S, environment, metrics, quickstart_settings, rlmath

# What a clock decides.
VARIES = ("timing/", "throughput/", "time_s", "rollout/idle_share")
SETTINGS = [
    "actor.tensor_parallel=1",
    "eval.every=0",
    "runner.resume=auto",
    "runner.save_every=2",
    "runner.steps=4",
    "runner.check_export_sequences=0",
    f"reward.items=[{{name: '{ROOT / 'tests' / 'e2e' / 'odd_reward.py'}:odd'}}]",
    "rollout.schedule=carry_over",
    "rollout.carry_over_tokens=20",
    "rollout.max_lag=2",
    "algorithm.correction.kind=token_truncate",
]


def test_a_killed_run_continues_with_what_was_sampled(material: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def settings(folder: Path, *more: str) -> list[str]:
        return ["train", *quickstart_settings(material, folder), *SETTINGS, *more]

    run = rlmath(*settings(straight, "rollout.engines=2"))
    assert run.returncode == 0, run.stderr
    lines = metrics(straight)
    assert lines[-1]["rollout/lag_max"] == 2 and lines[-1]["rollout/mixed_sample_share"] > 0
    # Tokens of older weights differ, those of the present ones do not.
    assert lines[-1]["mismatch/lag_1/k3"] > 100 * lines[-1]["mismatch/lag_0/k3"] > 0
    assert all(line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    assert not list((straight / "journal").glob("*")), "a checkpoint covers all steps"

    _kill_while_sampling(settings(killed, "rollout.engines=2"), killed, step=3)
    assert len(metrics(killed)) == 2
    run = rlmath(*settings(killed, "rollout.engines=1"))
    assert run.returncode == 0, run.stderr
    assert "samples came from the journal" in run.stdout
    assert _ledger(killed) == _ledger(straight)
    for step in range(1, 5):
        assert _samples(killed, step) == _samples(straight, step)
    for one, other in zip(lines, metrics(killed), strict=True):
        expected = {
            k: v
            for k, v in one.items()
            if isinstance(v, float) and not k.startswith(VARIES) and "seconds" not in k
        }
        found = {k: v for k, v in other.items() if k in expected}
        # Sequences share an engine's batch with others as they come, which may change a last digit
        # of their log-probs.
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights, again = (load_file(f / "hf" / "model.safetensors") for f in (straight, killed))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, again[name], rtol=0, atol=1e-5, msg=name)


def _kill_while_sampling(arguments: list[str], folder: Path, step: int) -> None:
    """Run until samples of a step are in the journal, and kill all of it."""
    journal = folder / "journal" / f"step_{step:06d}.bin"
    command = [sys.executable, "-m", "rlmath", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not (journal.exists() and journal.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)


def _ledger(folder: Path) -> list[dict[str, Any]]:
    """The events in force, of the groups in their order."""
    found: list[dict[str, Any]] = []
    for line in (folder / "ledger.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "resumed":
            found = [one for one in found if one["step"] <= event["step"]]
        else:
            found.append(event)
    return found


def _samples(folder: Path, step: int) -> list[dict[str, Any]]:
    rows = (folder / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    varies = ("engine", "log_probs")
    return [{k: v for k, v in json.loads(row).items() if k not in varies} for row in rows]
