import contextlib
import json
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rlmath.config.arithmetic import policy_updates, resolve_layout
from rlmath.config.load import load
from rlmath.config.reward import WorkersOn
from rlmath.config.rollout import RolloutConfig
from rlmath.config.schema import Device
from rlmath.data import ProblemStream
from rlmath.errors import UserError
from rlmath.grading import MathGrader
from rlmath.grading.pool import Result
from rlmath.model.lora import Lora
from rlmath.model.published import KNOWN
from rlmath.model.tiny import make_tiny_model
from rlmath.training import opening
from rlmath.training.attempt import check_resumed
from rlmath.training.engine_settings import engines_have_to_read
from rlmath.training.group_source import GroupSource
from rlmath.training.opening import reward_mix
from rlmath.training.rank_settings import actor_settings, value_model_settings
from rlmath.training.resumed_model import check_resumed_model
from rlmath.training.sft import DiscardedSteps
from rlmath.types import Problem

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

    monkeypatch.setattr(opening, "MathGrader", grader)
    monkeypatch.setattr(opening.os, "sched_getaffinity", lambda _: set(range(cores)))
    settings = [f"reward.num_workers={one}" for one in given]
    with pytest.raises(InterruptedError), reward_mix(load([*GIVEN, *settings])):
        pass
    assert found == [workers]


@pytest.mark.process
def test_a_graders_workers_may_be_the_engines_nodes(monkeypatch):
    """They answer what its own would, and end with the stack, before Ray does."""
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

    def make_workers(settings, engines, num_workers):
        assert (settings.timeout_s, engines, num_workers) == (3.0, ("one", "two"), 5)
        return Workers()

    monkeypatch.setattr(opening, "node_workers", make_workers)
    config = load([*GIVEN, "reward.workers_on=engines", "reward.num_workers=5"])
    assert config.reward.workers_on is WorkersOn.engines
    with MathGrader(2, 3.0, audit_fraction=0.0) as grader:
        with contextlib.ExitStack() as stack:
            stack.callback(ends.append, "Ray")
            opening.grade_there(grader, ("one", "two"), config.reward, stack)
            grade = grader.grade_one(r"\boxed{\sum_{k=1}^1 \sin^2 x + \cos^2 x}", "1")
            assert grade.correct and asked == [r"\sum_{k=1}^1 \sin^2 x + \cos^2 x"]
        assert ends == ["workers", "Ray"]


RANK_4 = {
    "rank": 4,
    "alpha": 32.0,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "layers": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def settings(model, *more):
    return load([f"model.path={model}", "model.dtype=float32", "runner.run_dir=r", *more])


def checkpoint(folder, lora=None, *, has_values=False):
    path = folder / "step_000003"
    for name in ("actor", *(["value_model"] * has_values)):
        (path / name).mkdir(parents=True)
    about = {"dtype": "float32", "lora": lora, "layout": {"tensor_parallel": 8}}
    (path / "actor" / "about.json").write_text(json.dumps(about))
    return path


def test_the_same_models_in_another_layout_pass(model, tmp_path):
    check_resumed_model(settings(model), checkpoint(tmp_path / "a"))
    check_resumed_model(settings(model), checkpoint(tmp_path / "b", has_values=True))
    own = "actor.lora.rank=4"
    check_resumed_model(settings(model, own), checkpoint(tmp_path / "c", RANK_4))
    # A damaged file is the ranks' matter.
    path = checkpoint(tmp_path / "d")
    (path / "actor" / "about.json").write_text("{")
    check_resumed_model(settings(model), path)


@pytest.mark.parametrize(
    "lora, more, said",
    [
        (None, ["model.dtype=bfloat16"], "model.dtype: float32 -> bfloat16. Set"),
        (RANK_4, ["actor.lora.rank=8"], "settings: actor.lora.rank: 4 -> 8. Set"),
        (RANK_4, [], "settings: actor.lora.rank: 4 -> 0. Set"),
        (None, ["actor.lora.rank=4"], "settings: actor.lora.rank: 0 -> 4. Set"),
        (RANK_4, ["actor.lora.rank=4", "actor.lora.alpha=8"], "actor.lora.alpha: 32.0 -> 8.0. Set"),
    ],
)
def test_other_weights_to_train_are_named_by_their_settings(model, tmp_path, lora, more, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        check_resumed_model(settings(model, *more), checkpoint(tmp_path, lora))


def test_other_data_is_refused_before_anything_starts(model, tmp_path):
    problems = [Problem(f"a:{i}", "?", (1,), ("2",)) for i in range(3)]
    place = ProblemStream(problems).state_dict()
    found = SimpleNamespace(path=checkpoint(tmp_path), driver_state={"sampler": {"stream": place}})
    check_resumed(settings(model), ProblemStream(problems), found)
    with pytest.raises(UserError, match=r"was 3 and is 2.*model\.path"):
        check_resumed(settings(model), ProblemStream(problems[:2]), found)


def test_a_value_model_that_is_not_there(model, tmp_path):
    path = checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"advantage=gae: .*step_000003 has no value model"):
        check_resumed_model(settings(model, "algorithm.advantage=gae"), path)


@pytest.mark.parametrize("groups", [(), ("a group",)])
def test_weights_come_back_when_engines_sleep(groups):
    """Not before, as they would not fit; and not for a step that trains nothing."""
    events = []
    pool = SimpleNamespace(sleep=lambda: events.append("sleep"))
    rewards = SimpleNamespace(set_step=lambda *_: None)
    run = SimpleNamespace(
        config=SimpleNamespace(runner=SimpleNamespace(steps=1), rollout=RolloutConfig()),
        sampling=SimpleNamespace(pool=pool, rewards=rewards),
        actor=SimpleNamespace(begin_load=lambda: events.append("load")),
    )
    sampled = SimpleNamespace(groups=groups)
    sampler = SimpleNamespace(is_sampled=True, take=lambda _: events.append("take") or sampled)
    monitor = None
    assert GroupSource(run, sampler, monitor).take(1) is sampled
    assert events == ["take", "sleep", *(["load"] if groups else [])]


def test_steps_in_a_row_that_change_no_weight_end_the_run():
    seen = DiscardedSteps()
    for step, reason in enumerate(["", "nan", "nan", "", "nan", "nan"], start=1):
        seen.update(step, reason)
    with pytest.raises(
        UserError, match=r"steps 5 to 7 changed no weight: loss = nan.*optimizer.lr"
    ):
        seen.update(7, "loss = nan")


def test_from_the_first_step_on_the_model_is_suspected():
    seen = DiscardedSteps()
    seen.update(1, "x")
    seen.update(2, "x")
    with pytest.raises(UserError, match=r"steps 1 to 3 changed no weight.*model.path"):
        seen.update(3, "x")
