"""Recorded passes give the model's tokens and log-probs bit for bit, with the weights of that time,
and whatever a replay would not repeat is not recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_unmerged_families import make_folder

from rlmath.vllm_plugin.cpu_recordings import Recording

SCRIPT = Path(__file__).with_name("recordings_engine.py")


@pytest.fixture(scope="module")
def found(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By case; see ``recordings_engine.py``."""
    return run(str(model_folder), str(tmp_path_factory.mktemp("recordings")))


def run(*arguments: str) -> dict[str, dict[str, Any]]:
    run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    results: dict[str, dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
    return results


def test_samples_are_those_of_the_model(found: dict[str, dict[str, Any]]) -> None:
    case = found["plain"]
    assert len(case["recorded"]) == 18
    assert case["recorded"] == case["plain"]
    # One recording for each number of sequences, the first compared with the model.
    assert case["made"] == len(case["sizes"]) > 3
    assert case["is_proven"]
    assert case["replays"] > 200


def test_replays_have_the_weights_of_each_update(found: dict[str, dict[str, Any]]) -> None:
    check_updates(found["weights"])


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama3", marks=pytest.mark.long)])
def test_other_families_are_recorded(tmp_path: Path, family: str) -> None:
    """Such as one with norms of queries and keys."""
    found = run(str(make_folder(family, tmp_path / "model")), str(tmp_path), "short")
    assert found["plain"]["recorded"] == found["plain"]["plain"]
    check_updates(found["weights"])


def check_updates(case: dict[str, Any]) -> None:
    others = [case["before"]]
    for update in ("0.3", "0.6"):
        after = case[update]
        assert after["recorded"] == after["plain"]
        assert after["recorded"] not in others
        others.append(after["recorded"])
        # The matrices came to the recordings that there were.
        assert after["made"] == len(after["sizes"])
    assert case["0.6"]["replays"] > case["0.3"]["replays"] > 300


def test_what_moves_in_memory_is_recorded_again(found: dict[str, dict[str, Any]]) -> None:
    case = found["moved"]
    assert case["recorded"] == case["plain"] != case["before"]
    assert case["made"] > len(case["sizes"])


def test_hooks_see_every_pass(found: dict[str, dict[str, Any]]) -> None:
    case = found["hooks"]
    # As many as a generation replays, and those that it records or prefills.
    assert case["passes"] > case["replays"] > 200


def test_nothing_of_the_pass_before_is_left_for_the_comparison() -> None:
    """Else a missing operator would not show where two passes happen to give the same."""
    own = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    recording = Recording([], [], [], [], own, own[0])
    recording.spoil()
    assert recording.replay(torch.empty(0)).isnan().all()
    assert not own[1].any()


@pytest.mark.parametrize("name", ["reshape_and_cache", "cpu_attention", "silu", "copy_"])
def test_a_recording_that_lacks_an_operator_is_found_out(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    case = found[f"without {name}"]
    assert case["recorded"] == case["plain"]
    assert case["replays"] == 0
    assert "other values than the model" in case["reason"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("asks for a value", "the model calls aten::"),
        ("keeps a sum", "takes a tensor that may be another one next time"),
        ("keeps a sum in a buffer", "changes what the next pass reads"),
    ],
)
def test_a_model_that_does_more_is_not_recorded(
    found: dict[str, dict[str, Any]], name: str, reason: str
) -> None:
    case = found[name]
    assert reason in case["reason"]
    assert case["replays"] == 0


def test_a_recorder_that_fails_stops_no_engine(found: dict[str, dict[str, Any]]) -> None:
    case = found["fails"]
    assert case["recorded"] == case["plain"]
    assert case["reason"].startswith("ZeroDivisionError")


def test_memory_is_bounded(found: dict[str, dict[str, Any]]) -> None:
    small, few = found["small passes"], found["few"]
    assert small["recorded"] == small["plain"]
    assert small["too_large"] <= 8
    assert max(small["sizes"]) < small["too_large"]
    assert few["recorded"] == few["plain"]
    assert few["bytes"] <= 2**18
    assert few["made"] > len(few["sizes"])
