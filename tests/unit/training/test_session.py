"""What settings say of the ranks' model."""

import contextlib
import json
from concurrent.futures import Future

import pytest

from rlmath.config.arithmetic import policy_updates, resolve_layout
from rlmath.config.load import load
from rlmath.config.reward import WorkersOn
from rlmath.config.schema import Device
from rlmath.grading import MathGrader
from rlmath.grading.pool import Result
from rlmath.model.lora import Lora
from rlmath.model.published import KNOWN
from rlmath.training import session
from rlmath.training.session import (
    actor_settings,
    engines_have_to_read,
    reward_mix,
    value_model_settings,
)

GIVEN = ["model.path=m", "data.train_paths=[x]", "runner.run_dir=r"]


@pytest.mark.parametrize(
    ("overrides", "resumes", "reads"),
    [
        ([], False, True),
        ([], True, False),
        (["cluster.nodes=8", "cluster.ray_address=auto"], False, False),
        # The base model is not what a sync brings.
        (["actor.lora.rank=8", "actor.lora.rollout=unmerged"], True, True),
        (["rollout.quantization=fp8"], True, True),
        (["rollout.kv_cache_dtype=fp8"], True, True),
    ],
)
def test_engines_read_no_weights_where_the_ranks_send_all_before_the_first_step(
    overrides, resumes, reads
):
    assert engines_have_to_read(load([*GIVEN, *overrides]), resumes=resumes) is reads


@pytest.mark.parametrize("logits", ["auto", "whole", "chunked"])
def test_the_ranks_are_told_how_to_take_logits(logits, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen2.5-1.5B"]))
    given = [f"model.path={tmp_path}", "data.train_paths=[x]", f"runner.run_dir={tmp_path}"]
    config = load([*given, "cluster.device=cpu", f"actor.logits={logits}"])
    layout = resolve_layout(config, Device.cpu)
    settings = actor_settings(config, layout, config.actor.optimizer, 1, 1.0)
    assert settings.model.logits == logits


def test_the_policy_has_adapters_and_the_value_model_has_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen2.5-1.5B"]))
    given = [f"model.path={tmp_path}", "data.train_paths=[x]", f"runner.run_dir={tmp_path}"]
    given += ["cluster.device=cpu", "algorithm.advantage=gae", "runner.seed=5"]
    config = load([*given, "actor.lora.rank=8", "actor.lora.targets=[v_proj,q_proj]"])
    layout = resolve_layout(config, Device.cpu)
    settings = actor_settings(config, layout, config.actor.optimizer, 1, 1.0)
    assert settings.lora == Lora(8, 32.0, ("q_proj", "v_proj"), seed=5)
    value = value_model_settings(config, settings)
    assert value is not None and value.lora is None


def test_the_policys_schedule_begins_when_the_value_model_has_warmed_up(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen2.5-1.5B"]))
    given = [f"model.path={tmp_path}", "data.train_paths=[x]", f"runner.run_dir={tmp_path}"]
    given += ["cluster.device=cpu", "runner.steps=100", "algorithm.minibatches_per_step=4"]
    given += ["value.warmup_steps=50", "value.optimizer.schedule=linear"]
    config = load([*given, "algorithm.advantage=gae"])
    layout = resolve_layout(config, Device.cpu)
    settings = actor_settings(config, layout, config.actor.optimizer, policy_updates(config), 1.0)
    value = value_model_settings(config, settings)
    assert settings.optimizer.decay_steps == 200
    assert value is not None and value.optimizer.decay_steps == 400
    # Without a value model nothing waits for it.
    assert policy_updates(load([*given, "algorithm.advantage=grpo"])) == 400


@pytest.mark.parametrize(
    ("cores", "given", "workers"), [(2, (), 2), (16, (), 4), (256, (), 32), (256, ("3",), 3)]
)
def test_a_graders_workers_follow_the_cores(cores, given, workers, monkeypatch):
    found = []

    def grader(num_workers, *_, **__):
        found.append(num_workers)
        raise InterruptedError

    monkeypatch.setattr(session, "MathGrader", grader)
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda _: set(range(cores)))
    settings = [f"reward.num_workers={one}" for one in given]
    with pytest.raises(InterruptedError), reward_mix(load([*GIVEN, *settings])):
        pass
    assert found == [workers]


def test_a_graders_workers_may_be_the_engines_nodes(monkeypatch):
    """They answer what its own would, and end with the session, before Ray does."""
    asked = []
    ends = []

    class Workers:
        def submit(self, job):
            asked.append(job["answer"])
            done = Future()
            done.set_result(Result({"verdict": True, "method": "sympy"}, 0.1))
            return done

        def close(self):
            ends.append("workers")

    def made(settings, engines, num_workers):
        assert (settings.timeout_s, engines, num_workers) == (3.0, ("one", "two"), 5)
        return Workers()

    monkeypatch.setattr(session, "node_workers", made)
    config = load([*GIVEN, "reward.workers_on=engines", "reward.num_workers=5"])
    assert config.reward.workers_on is WorkersOn.engines
    with MathGrader(2, 3.0, audit_fraction=0.0) as grader:
        with contextlib.ExitStack() as stack:
            stack.callback(ends.append, "Ray")
            session.grade_there(grader, ("one", "two"), config.reward, stack)
            grade = grader.grade_one(r"\boxed{\sum_{k=1}^1 \sin^2 x + \cos^2 x}", "1")
            assert grade.correct and asked == [r"\sum_{k=1}^1 \sin^2 x + \cos^2 x"]
        assert ends == ["workers", "Ray"]
