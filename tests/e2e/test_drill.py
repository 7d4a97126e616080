"""Silent faults planted in ranks, engine and driver of a real run, and the alarms that they set
off."""

import json

import pytest

from rlmath.commands.drill.catalog import FAULTS
from tests.e2e.runs import rlmath

# The plain command plants the same faults on real ranks (test_step_checks.py, test_healthy_steps.py
# in tests/distributed/) and in real engines (tests/engine/test_engine_weights.py).
pytestmark = pytest.mark.long

DRILL_TIMEOUT_S = 3600


def drill(folder, *words):
    found = folder / "outcomes.json"
    # Up to twenty runs, of which a quiet machine does two in a minute.
    done = rlmath("drill", *words, "--json", str(found), timeout_s=DRILL_TIMEOUT_S)
    return done.returncode, json.loads(found.read_text()), done.stdout + done.stderr


# Message of each alarm. A UserError is no failure of a component, so the supervisor starts nothing
# again (tests/unit/training/test_supervise.py). Where it is about log-probs, the live ranks and
# engine were compared layer by layer.
SAID = {
    "swapped_k_v": ("WeightsError", "k_proj"),
    "unsent_tensor": ("WeightsError", "engine 0: the weight update left 1 tensors"),
    "half_updated_rank": (None, ""),
    "lost_mask": (None, ""),
    "temperature": ("AlignmentError", "Values in all layers agree"),
    "attention_scale": ("AlignmentError", "They diverge first in layer 1, rotary embedding"),
    "prefix_cache": (None, ""),
    "copied_samples": (None, ""),
}


def test_each_place_of_a_run(tmp_path):
    """Weights sent, shards, engine and prefix cache; a healthy run between none of them."""
    code, outcomes, said = drill(tmp_path, "quickstart", "--only", ",".join(SAID))
    assert code == 0, said
    assert [one["name"] for one in outcomes] == ["healthy", *SAID]
    assert all(one["fired"] and not one["skipped"] for one in outcomes)
    for (name, (kind, words)), one in zip(SAID.items(), outcomes[1:], strict=True):
        assert kind in (None, one["kind"]), name
        assert words in str(one["message"]), name


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart"],
        ["qwen2.5-7b-grpo-megatron"],
        ["model=qwen3_30b_a3b", "recipe=dapo"],
        ["quickstart", "actor.lora.rank=8"],
        ["quickstart", "algorithm.advantage=gae"],
        ["quickstart", "rollout.schedule=continuous", "algorithm.correction.kind=token_truncate"],
    ],
    ids=lambda words: words[-1],
)
def test_drill_triggers_every_alarm(words, tmp_path):
    code, outcomes, said = drill(tmp_path, *words)
    assert code == 0, said
    assert len(outcomes) == 1 + len(FAULTS)
