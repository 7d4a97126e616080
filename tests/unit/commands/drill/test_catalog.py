"""The faults: what they replace is there, and they put it back."""

import ast
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import ray

from rlmath.cli import main
from rlmath.commands.drill import in_engines, in_ranks, table
from rlmath.commands.drill.catalog import FAULTS, select
from rlmath.commands.drill.fault import Scene
from rlmath.commands.drill.in_engines import _when_undone, in_actors, plant_in_engines
from rlmath.commands.drill.runner import Outcome
from rlmath.config.load import load
from rlmath.errors import UserError
from rlmath.model.published import KNOWN, published_spec


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("rlmath.actor.rank_step", ["RankStep", "token_advantages"]),
        ("rlmath.actor.policy", ["MegatronActor.finish_minibatch", "policy_loss"]),
        ("rlmath.actor.policy_loss", ["policy_objective"]),
        ("rlmath.actor.group", ["shards"]),
        ("rlmath.checkpoint.state", ["load_optimizer_state", "load_schedule_state"]),
        ("rlmath.training.step_batch", ["sequence_advantages", "estimator_rewards"]),
        ("rlmath.rewards.mix", ["RewardMix.grade"]),
        ("rlmath.engines.step_loop", ["StepLoop.submit"]),
        ("rlmath.rollout.pool", ["RolloutPool.generate", "RolloutPool.call_workers"]),
        ("rlmath.rollout.seeds", ["request_seed"]),
        ("rlmath.training.step_batch", ["sampled_sequences"]),
        ("rlmath.rewards.answers", ["AnswerGrader.grade"]),
    ],
)
def test_patched_names_of_faults_exist(module, names):
    for name in names:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_each_fault_is_complete(tmp_path):
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    values = load(["experiment=quickstart", "algorithm.advantage=gae"])
    terms = ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01"]
    optimizer = ["actor.optimizer.schedule=cosine", "actor.data_parallel=2"]
    rest = load(["experiment=quickstart", *terms, *optimizer])
    adapters = load(["experiment=quickstart", "actor.lora.rank=4"])
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["GLM-4.5-Air"]))
    moe = load(["experiment=quickstart", f"model.path={tmp_path}"])
    for fault in FAULTS:
        re.compile(fault.says)
        assert fault.where in ("ranks", "engine", "driver", "data")
        assert None in [fault.missing(one) for one in (values, rest, adapters, moe)], fault.name
        assert fault.from_step + fault.latest - 1 <= 4


def texts():
    """Every text of the package but the drill's own; what is filled in is ``{}``."""
    package = Path(in_ranks.__file__).resolve().parents[2]
    found = set()
    for file in package.rglob("*.py"):
        if file.parent.name == "drill":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    one.value if isinstance(one, ast.Constant) else "{}" for one in node.values
                )
                found.add("".join(map(str, parts)))
    return found


def test_alarms_still_say_what_a_drill_looks_for():
    """A message that is reworded would have its drill fail, which no quick test runs."""
    known = texts()
    for fault in FAULTS:
        words = fault.says.replace(r"\|", "\0").replace("planted by rlmath drill|", "")
        for part in re.split(r"\.\*|\\d\+|\|", words):
            part = part.strip().replace("\0", "|").replace("\\.", ".")
            # Models, parameters, detectors and ranks are filled in.
            part = part.removesuffix(" the value model's")
            if part in ("layers.0.", "on rank") or part.endswith(": since step"):
                continue
            assert any(part in text for text in known), f"{fault.name}: no message says {part!r}"


def test_faults_that_a_configuration_cannot_have(tmp_path):
    reasons = {
        "half_updated_rank": "actor.tensor_parallel=1",
        "frozen_layer": "actor.lora.layers=[1]",
        "frozen_value_layer": "algorithm.advantage=grpo",
        "prefix_cache": "rollout.prefix_caching=false",
        "grading_timeouts": "reward.items=[{name: format}]",
        "leaked_answers": "data.max_leaked_answers=1",
    }
    for fault in FAULTS:
        if fault.name in reasons:
            config = load(["experiment=quickstart", "actor.lora.rank=4", reasons[fault.name]])
            assert str(fault.missing(config)).startswith(reasons[fault.name].split("=")[0])
    keeps = load(["experiment=quickstart", "rollout.schedule=continuous", "rollout.kv=keep"])
    (prefixes,) = (fault for fault in FAULTS if fault.name == "prefix_cache")
    assert str(prefixes.missing(keeps)).startswith("rollout.kv=keep")
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["DeepSeek-V3"]))
    latent = load(["experiment=quickstart", f"model.path={tmp_path}"])
    assert str(prefixes.missing(latent)).startswith("latent attention")
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen3.5-9B"]))
    assert str(prefixes.missing(latent)).startswith("linear attention")
    unmerged = load(["experiment=quickstart", "actor.lora.rank=4", "actor.lora.rollout=unmerged"])
    without = {fault.name for fault in FAULTS if "unmerged" in str(fault.missing(unmerged))}
    assert without == {"swapped_k_v", "prefix_cache"}


@pytest.mark.parametrize(
    ("name", "order"), [("Qwen3-8B", [0, 1, 3, 2]), ("Qwen3.5-9B", [0, 1, 2, 3, 5, 4])]
)
def test_keys_and_values_are_swapped_beside_queries_and_gates(monkeypatch, name, order):
    """Two query heads of width 1 to a key-value group."""
    import torch

    spec = replace(published_spec(name), heads=2, kv_heads=1, head_dim=1)
    rows = torch.arange(float(len(order)))[:, None]
    named = [("decoder.layers.0.self_attention.linear_qkv.weight", rows)]
    module = SimpleNamespace(named_parameters=lambda: named)
    found = []
    monkeypatch.setattr(in_ranks, "_sending", lambda _, __, values: found.extend(values()))
    in_ranks.swap_k_and_v(SimpleNamespace(actor=SimpleNamespace(spec=spec, module=module)))
    assert [one.flatten().tolist() for one in found] == [order]


def test_replaced_methods_come_back():
    class Owner:
        def method(self):
            return 1

    module = SimpleNamespace(name=len)
    worker, owner = SimpleNamespace(), Owner()
    for what, name in ((owner, "method"), (module, "name"), (owner, "method")):
        in_ranks.replace(worker, what, name, lambda original: lambda *_: 10)
    assert (owner.method(), module.name([])) == (10, 10)
    in_ranks.restore(worker)
    in_ranks.restore(worker)
    assert owner.method() == 1 and module.name is len
    assert vars(owner) == {} and vars(worker) == {}


def test_norms_and_rotary_embeddings_come_back():
    import torch

    angles = torch.outer(torch.arange(8).float(), torch.tensor([1.0, 0.1]))
    cache = torch.cat([angles.cos(), angles.sin()], 1)
    norm = SimpleNamespace(variance_epsilon=1e-6)
    rotary = SimpleNamespace(cos_sin_cache=cache.clone())
    # Models that vLLM computes with transformers' modules.
    own = torch.nn.Module()
    for name in ("inv_freq", "original_inv_freq", "sliding_attention_inv_freq"):
        own.register_buffer(name, torch.tensor([1.0, 0.1]), persistent=False)
    model = SimpleNamespace(modules=lambda: [norm, rotary, rotary, own])
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    in_engines.other_epsilon(worker)
    in_engines.other_rope(worker)
    assert norm.variance_epsilon == pytest.approx(1e-5)
    theta = 1.2 * 100.0  # Of two frequencies, 1 and theta ** -0.5.
    wanted = torch.outer(torch.arange(8).float(), torch.tensor([1.0, theta**-0.5]))
    assert torch.allclose(rotary.cos_sin_cache, torch.cat([wanted.cos(), wanted.sin()], 1))
    for name in ("inv_freq", "sliding_attention_inv_freq"):
        assert torch.allclose(own.get_buffer(name), torch.tensor([1.0, theta**-0.5]))
    in_engines.put_back(worker)
    assert all(torch.equal(one, torch.tensor([1.0, 0.1])) for one in own.buffers())
    assert norm.variance_epsilon == 1e-6 and torch.equal(rotary.cos_sin_cache, cache)


def test_names_are_chosen():
    assert [one.name for one in select("temperature, one_seed")] == ["temperature", "one_seed"]
    assert select(None) == list(FAULTS)
    with pytest.raises(UserError, match=r"rope_teta.*did you mean rope_theta"):
        select("rope_teta")


def test_the_console_lists_and_checks(capsys):
    assert main(["drill", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)
    assert main(["drill", "quickstart", "--check", "rollout.temperature=0.9"]) == 0
    assert "algorithm.group_size: 8 -> 4" in capsys.readouterr().out
    assert main(["drill"]) == 2
    assert main(["drill", "quickstart", "rollout.temperature=-1"]) == 2
    assert "rollout.temperature" in capsys.readouterr().err


def outcome(name, fired, steps, **changes):
    given = {
        "what": "planted",
        "where": "ranks",
        "alarm": "gate",
        "latest": 1,
        "kind": "UserError" if steps is not None else "",
        "message": "a | message\nof two lines",
        "skipped": False,
        "seconds": 2.0,
    }
    return Outcome(name=name, fired=fired, steps=steps, **given | changes)


def test_drill_tables():
    outcomes = [
        outcome("healthy", True, None, kind="", message=""),
        outcome("seen", True, 1),
        outcome("unseen", False, None),
        outcome("not_here", False, None, skipped=True),
    ]
    assert table.summary(outcomes).startswith("1 of 2 alarms fired; 1 do not apply\nno alarm: unse")
    lines = [table.line(one) for one in outcomes]
    assert [line.split()[0] for line in lines] == ["ok", "ok", "FAILED", "skipped"]
    assert "UserError after 1 step: a | message of two lines" in lines[1]
    rows = table.markdown(outcomes).splitlines()
    assert [row.split("|")[5].strip() for row in rows[2:]] == [
        "",
        "1",
        "**never**",
        "does not apply",
    ]
    assert table.as_plain(outcomes)[1]["name"] == "seen"


def test_drills_side_by_side(tmp_path, capsys):
    first = [outcome("healthy", True, None, kind=""), outcome("seen", True, 1)]
    second = [
        outcome("healthy", False, 2),
        outcome("seen", False, None),
        outcome("other", False, 0, skipped=True, message="actor.x=1: there is none"),
    ]
    for name, outcomes in (("one", first), ("two", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(table.as_plain(outcomes)))
    words = ["--table", f"quickstart={tmp_path}/one.json", "--table", f"{tmp_path}/two.json"]
    assert main(["drill", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| fault | quickstart | two |",
        "|---|---|---|",
        "| healthy | none | **fired** |",
        "| seen | 1 | **never** |",
        "| other |  | — |",
        "",
        "- two: `other` does not apply: actor.x=1: there is none",
    ]
    assert main(["drill", "--table", str(tmp_path / "none.json")]) == 2


def test_a_fault_may_wait_for_groups_of_earlier_steps():
    """Dynamic sampling that asks for more groups trains on the rest in the next steps."""
    from rlmath.commands.drill.runner import steps_ahead

    def of(*overrides):
        base = ("experiment=quickstart", "model.path=tiny", "runner.run_dir=r")
        return steps_ahead(load([*base, *overrides]))

    assert of() == 0
    assert of("algorithm.filter.keep=accuracy", "algorithm.filter.oversample=2.5") == 2


class Engine:
    """An engine's Ray actor: calls run here, and fail once it is dead."""

    def __init__(self):
        self.dead, self.calls = False, list[str]()
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    def _call(self, function):
        if self.dead:
            raise RuntimeError("this actor is dead")
        function(self)


def plant(engine):
    engine.calls.append("plant")
    _when_undone(engine, lambda: engine.calls.append("back"))


def test_a_fault_is_undone_in_the_engines_that_are_left(monkeypatch):
    """A call to the one that was restarted would end the drill with a traceback."""
    monkeypatch.setattr(ray, "get", lambda found: found)
    old, new, other = Engine(), Engine(), Engine()
    pool = SimpleNamespace(engines=[old, other])
    scene = cast(Scene, SimpleNamespace(run=SimpleNamespace(sampling=SimpleNamespace(pool=pool))))
    with plant_in_engines(scene, in_actors, plant):
        old.dead = True
        pool.engines = [new, other]
    assert (old.calls, new.calls, other.calls) == (["plant"], [], ["plant", "back"])
