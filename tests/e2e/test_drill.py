"""Silent faults planted in ranks, engine and driver of a real run, and the alarms that they set
off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.commands.drill.catalog import FAULTS
from tests.e2e.runs import rlmath

DRILL_TIMEOUT_S = 3600


def drill(folder: Path, *words: str) -> tuple[int, list[dict[str, object]], str]:
    found = folder / "outcomes.json"
    # Up to twenty runs, of which a quiet machine does two in a minute.
    done = rlmath("drill", *words, "--json", str(found), timeout_s=DRILL_TIMEOUT_S)
    return done.returncode, json.loads(found.read_text()), done.stdout + done.stderr


def test_each_place_of_a_run(tmp_path: Path) -> None:
    """Weights sent, shards, engine and prefix cache; a healthy run between none of them."""
    names = (
        "swapped_k_v,unsent_tensor,lost_mask,half_updated_rank,temperature,attention_scale,"
        "prefix_cache,copied_samples"
    )
    code, outcomes, said = drill(tmp_path, "quickstart", "--only", names)
    assert code == 0, said
    assert [one["name"] for one in outcomes] == ["healthy", *names.split(",")]
    assert all(one["fired"] and not one["skipped"] for one in outcomes)
    kinds = {str(one["name"]): one["kind"] for one in outcomes}
    assert kinds["swapped_k_v"] == "WeightsError" and kinds["temperature"] == "AlignmentError"
    assert "k_proj" in str(outcomes[1]["message"])
    # One message with the name. A UserError is no failure of a component, so the supervisor
    # starts nothing again (tests/unit/training/test_supervise.py).
    assert kinds["unsent_tensor"] == "WeightsError"
    assert str(outcomes[2]["message"]).startswith("engine 0: the weight update left 1 tensors")
    # The live ranks and engine are compared, layer by layer.
    said_by = {str(one["name"]): str(one["message"]) for one in outcomes}
    assert "They part first in layer 1, rotary embedding" in said_by["attention_scale"]
    assert "Values in all layers agree" in said_by["temperature"]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["quickstart"],
        ["qwen2.5-7b-grpo-megatron"],
        ["model=qwen3_30b_a3b", "recipe=dapo"],
        ["quickstart", "actor.lora.rank=8"],
        ["quickstart", "algorithm.advantage=gae"],
        [
            "quickstart",
            "rollout.schedule=continuous",
            "algorithm.correction.kind=token_truncate",
        ],
    ],
    ids=lambda words: words[-1],
)
def test_every_alarm(words: list[str], tmp_path: Path) -> None:
    code, outcomes, said = drill(tmp_path, *words)
    assert code == 0, said
    assert len(outcomes) == 1 + len(FAULTS)
