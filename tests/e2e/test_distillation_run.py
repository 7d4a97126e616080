"""Two steps of on-policy distillation from the command line, resumed and replayed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmath.model.tiny import make_tiny_model
from rlmath.monitor.digests import read_digests
from rlmath.training.kept_batches import read_step
from rlmath.training.kept_files import FOLDER, kept_file
from tests.e2e.runs import metrics, quickstart_settings, rlmath

SETTINGS = [
    "actor.tensor_parallel=1",
    "eval.every=0",
    "algorithm.distill_coef=0.5",
    "teacher.dtype=float32",
    "runner.save_every=1",
    "runner.keep_checkpoints=3",
    "runner.check_export_sequences=0",
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


@pytest.fixture(scope="module")
def straight(material, teacher, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("distilled")
    train(material, run_dir, teacher)
    return run_dir


def train(material, run_dir, teacher, *more):
    settings = [*quickstart_settings(material, run_dir), *SETTINGS, f"teacher.path={teacher}"]
    run = rlmath("train", *settings, *more)
    assert run.returncode == 0, run.stderr
    assert f"teacher  {teacher}: 1 engine(s) x tensor 1" in run.stdout


@pytest.mark.long
def test_a_batch_has_the_log_probs_that_transformers_gives(straight, teacher):
    """With adapters: test_plugins_run.py."""
    check(straight, teacher)


def check(run_dir, teacher):
    """The kept batches have the teacher's log-probs."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for step, line in enumerate((x for x in metrics(run_dir) if x["step"]), 1):
        kept = read_step(kept_file(run_dir / FOLDER, step)).batch
        assert line["timing/teacher"] > 0 and line["train/grad_norm"] > 0
        # Two random models.
        assert line["distill/reverse_kl"] > 0
        for place in range(0, len(kept), 5):
            one = kept.sequences.select([place])
            tokens, prompt = one.tokens.long(), int(one.prompt_lengths)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, prompt - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0]
            found = one.teacher_log_probs
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.long
def test_distillation_resumes_bit_equal_and_is_replayed(material, teacher, straight, tmp_path):
    checkpoint = straight / "checkpoints" / "step_000001"
    # Without a lag it is what it was.
    schedule = ("rollout.schedule=pipelined", "rollout.max_lag=0")
    train(material, tmp_path, teacher, f"runner.resume={checkpoint}", *schedule)
    wanted, found = (list(read_digests(one))[-1] for one in (straight, tmp_path))
    assert found["step"] == 2 and {"teacher_log_probs", "advantages", "weights"} <= set(found)
    assert found.pop("settings") != wanted.pop("settings")
    assert found == wanted
    # The teacher's answers are kept, so that a replay starts none.
    replay = rlmath("replay", str(straight), "2", "--json")
    assert replay.returncode == 0, replay.stderr
    (step,) = json.loads(replay.stdout)["steps"]
    assert step["bit_equal"] and {"teacher_log_probs", "advantages"} <= {*step["equal"]}
