"""Asynchronous scheduling changes no sample, and leaves nothing running when the engine is idle.

Nor do rounds of decode steps (``rlmath/engines/patches/cpu_rounds.py``), which the other engine
runs.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("async_engine.py")
# One token in thirteen ends a response, so that the last request ends before its limit, with a
# step for it in flight.
END_IDS = [256, *range(20)]


@pytest.fixture(scope="module")
def results_by_mode(model_folder, tmp_path_factory):
    """Results without and with asynchronous scheduling; see ``async_engine.py``."""
    folder = tmp_path_factory.mktemp("async")
    model = shutil.copytree(model_folder, folder / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": END_IDS}))
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), str(folder)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    results = json.loads(line.removeprefix("RESULT "))
    return results


def test_batches_are_scheduled_ahead(results_by_mode):
    assert results_by_mode["sync"]["most_in_flight"] == 0
    assert results_by_mode["async"]["scheduler"] == "AsyncDecodeScheduler"
    assert results_by_mode["async"]["most_in_flight"] == 1
    assert results_by_mode["sync"]["most_at_once"] == 8
    assert results_by_mode["async"]["most_at_once"] == 1


def test_tokens_and_log_probs_are_those_of_an_engine_without_it(results_by_mode):
    samples = results_by_mode["async"]["samples"]
    assert len(samples) == 18
    assert {finish_reason for _, _, finish_reason, _ in samples.values()} == {"stop"}
    assert samples == results_by_mode["sync"]["samples"]
    # After requests were aborted in the middle.
    assert results_by_mode["async"]["samples_again"] == samples


def test_nothing_runs_after_a_generation_or_an_abort(results_by_mode):
    """A step in flight would compute with changing weights, or with memory that is given back."""
    assert results_by_mode["async"]["in_flight_after_generation"] == 0
    assert results_by_mode["async"]["in_flight_after_abort"] == 0
    assert results_by_mode["async"]["unfinished_after_abort"] == 0
    assert results_by_mode["async"]["prefix_cache_reset"]
