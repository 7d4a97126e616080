"""A run of adapters under a teacher, with one part of each kind from files of the user's: real
ranks and engines, a resume, a replay."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from rlmath.checkpoint.driver_state import read_driver_state
from rlmath.training.kept_files import kept_file
from rlmath.utils.array_file import read_header
from tests.e2e import test_distillation_run as distillation
from tests.e2e.runs import ROOT, check_replay, metrics, quickstart_settings, rlmath

teacher = distillation.teacher

REWARD = ROOT / "tests" / "e2e" / "odd_reward.py"
EXAMPLES = ROOT / "examples" / "plugins"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins") / "mine"
    shutil.copytree(EXAMPLES, folder)
    return folder


@pytest.fixture(scope="module")
def settings(material, teacher, mine):
    # The architecture of the example's family.
    model = mine.parent / "model"
    shutil.copytree(material / "model", model)
    fields = json.loads((model / "config.json").read_text())
    assert fields["architectures"] == ["Qwen2ForCausalLM"]
    fields["architectures"] = ["MyQwen2ForCausalLM"]
    (model / "config.json").write_text(json.dumps(fields))
    watched = f"{{name: '{mine / 'reward.py'}', weight: 0}}"
    return [
        *quickstart_settings(material, mine.parent / "run"),
        # Adapters over tensor ranks: tests/distributed/test_lora.py.
        "actor.tensor_parallel=1",
        "actor.lora.rank=8",
        "actor.lora.alpha=16",
        "actor.optimizer.lr=1e-2",
        "actor.offload=all",
        "algorithm.distill_coef=0.5",
        f"teacher.path={teacher}",
        "teacher.dtype=float32",
        f"model.path={model}",
        "data.train_paths=[]",
        f"data.source={mine / 'data_source.py'}:Sums",
        "data.source_options.slower=2",
        "data.eval_paths=[]",
        f"eval.benchmarks=[{{name: '{mine / 'benchmark.py'}:products', options: {{largest: 3}}}}]",
        "eval.every=2",
        f"reward.verifier={mine / 'verifier.py'}:close_enough",
        f"weights.transport={mine / 'weight_transport.py'}:TimedSharedMemory",
        "weights.transport_options.longer_than_s=1e-6",
        f"rollout.engine_arguments={mine / 'engine_arguments.py'}:arguments",
        "rollout.engine_options.name=mine_of_test",
        "runner.resume=auto",
        "runner.save_every=1",
        "runner.background_checkpoints=true",
        "algorithm.minibatches_per_step=2",
        # A model that has not learned yet gets rewards that differ.
        f"reward.items=[{{name: '{REWARD}:odd'}}, {{name: math}}, {watched}]",
        # By name, and directly.
        f"plugins=[{mine / 'loss.py'},{mine / 'step_check.py'},{mine / 'phase_observer.py'},"
        f"{mine / 'model_family.py'}]",
        f"runner.trackers=[tensorboard,{mine / 'tracker.py'}:CsvTracker]",
        "algorithm.loss=soft_clip",
        "algorithm.loss_options.limit=0.25",
        f"algorithm.advantage={mine / 'advantage.py'}:median",
        "algorithm.curriculum.cooldown=true",
        f"algorithm.curriculum.kind={mine / 'curriculum.py'}:Once",
        f"algorithm.correction.kind={mine / 'correction.py'}:temper",
        f"algorithm.filter.keep={mine / 'group_filter.py'}:spread",
        "algorithm.filter.options.least=0.01",
        f"algorithm.aggregation={mine / 'aggregation.py'}:power_length",
        "algorithm.kl_coef=0.1",
        f"algorithm.kl_estimator={mine / 'kl_estimator.py'}:huber",
        "algorithm.kl_options.limit=0.5",
    ]


@pytest.fixture(scope="module")
def run_dir(settings, mine):
    done = rlmath("train", *settings)
    assert done.returncode == 0, done.stderr
    assert "LoRA     rank 8, alpha 16" in done.stdout
    return mine.parent / "run"


def test_ranks_train_with_what_the_files_register(run_dir, mine):
    # Step 0 is an evaluation alone.
    before, *lines = metrics(run_dir)
    assert before["step"] == 0 and len(lines) == 2
    # Only this loss counts it.
    named = [name for name in lines[0] if "beyond_limit" in name]
    assert named == ["train/beyond_limit"], sorted(lines[0])[-60:]
    assert all("sampling/dropped_little_spread" in line for line in lines)
    saved = OmegaConf.load(run_dir / "config.yaml")
    assert saved.algorithm.loss_options == {"limit": 0.25}
    # An environment would change what is sampled; tests/e2e/test_tools_run.py has one.
    used = set(mine.glob("*.py")) - {mine / "environment.py"}
    assert set(saved.plugin_hashes) == {str(one) for one in (REWARD, *used)}
    assert (run_dir / "trace.json").read_text().count('"name": "generate"') >= 2
    assert all("checks/echoes" in line for line in lines)
    assert (run_dir / "metrics.csv").read_text().count("checks/echoes") == 2
    assert all(0 <= line["eval/accuracy"] <= 1 for line in (before, lines[1]))
    logs = {one.name: one.read_text() for one in (run_dir / "logs").glob("*.log")}
    assert any("served_model_name=mine_of_test" in text for text in logs.values()), sorted(logs)
    assert any("version 2 sent in" in text for text in logs.values()), sorted(logs)
    # Each row once, in order.
    names = [f"Sums:{number}" for number in range(1, 17)]
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    admitted = [one["problem"] for one in ledger if one["event"] == "admitted"]
    assert admitted[:16] == names
    # As do the kept batches and the checkpoints.
    kept = read_header(kept_file(run_dir / "replay", 2))
    state = read_driver_state(run_dir / "checkpoints" / "step_000002")
    assert kept["plugin_hashes"] == state["plugins"] == dict(saved.plugin_hashes)


def test_adapters_train_and_engines_have_them(material, run_dir):
    first, second = (line for line in metrics(run_dir) if line["step"] > 0)
    # The reference is the base model, which the policy is at first and then is not.
    assert second["train/kl"] > 0
    for line in (first, second):
        assert line["train/grad_norm"] > 0
        # In the second step adapters are in the weights that were sent.
        assert line["alignment/max_abs_diff"] <= 1e-4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["alignment/hf_mean_exp_abs_diff"] <= 1.0001
    base, merged, adapters = (
        load_file(folder)
        for folder in (
            material / "model" / "model.safetensors",
            run_dir / "hf" / "model.safetensors",
            run_dir / "hf_adapter" / "adapter_model.safetensors",
        )
    )
    config = json.loads((run_dir / "hf_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        whole = weight.double()
        if f"{stem}.lora_A.weight" in adapters:
            a, b = (adapters[f"{stem}.lora_{kind}.weight"].double() for kind in "AB")
            whole, changed = whole + 2 * b @ a, changed + 1
            assert b.any() and not torch.equal(merged[name], weight), name
        torch.testing.assert_close(merged[name].double(), whole, atol=1e-6, rtol=1e-5)
    assert 2 * changed == len(adapters) > 0
    # Twice the adapters' bytes or so, and not the model's.
    saved = sum(p.stat().st_size for p in (run_dir / "checkpoints").rglob("*.distcp"))
    weights = sum(weight.numel() for weight in base.values())
    assert saved < 12 * weights


def test_a_teachers_log_probs_are_those_of_transformers_beside_adapters(run_dir, teacher):
    distillation.check(run_dir, teacher)


@pytest.mark.long
def test_a_replay_repeats_it_to_the_last_bit(run_dir):
    """The teacher's answers are kept, so that it starts none. Other needs of a replay:
    test_algorithms.py."""
    for step in check_replay(run_dir, "2", "--from", "0")["steps"]:
        assert step["bit_equal"] and {"gradient_tensors", "teacher_log_probs"} <= {*step["equal"]}


def test_a_changed_file_is_named_by_resume_and_replay(run_dir, settings, mine):
    file = mine / "loss.py"
    before = file.read_text()
    then = OmegaConf.load(run_dir / "config.yaml").plugin_hashes[str(file)]
    file.write_text(before.replace(".tanh()", ".tanh() * 1.0"))
    try:
        resumed = rlmath("train", *settings, "runner.steps=3")
        assert resumed.returncode == 2
        assert f"plugin_hashes.{file}: {then} -> " in resumed.stderr
        assert "advantage.py" not in resumed.stderr.partition("other settings")[2]
        replayed = rlmath("replay", str(run_dir), "2")
        assert replayed.returncode == 2
        assert f"{file} has changed" in replayed.stderr and then in replayed.stderr
    finally:
        file.write_text(before)


@pytest.mark.long
def test_a_changed_file_that_is_accepted_continues_behind_the_last_row(run_dir, settings, mine):
    """A source from a script: test_python_run.py."""
    file = mine / "loss.py"
    before = file.read_text()
    file.write_text(before.replace(".tanh()", ".tanh() * 1.0"))
    try:
        accepted = ["runner.accept_changes=[plugin_hashes]", "runner.steps=3"]
        resumed = rlmath("train", *settings, *accepted)
        assert resumed.returncode == 0, resumed.stderr
        assert len(metrics(run_dir)) == 4
        ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
        admitted = [one["problem"] for one in ledger if one["event"] == "admitted"]
        # The data source continued behind the last row of step 2.
        assert admitted == [f"Sums:{number}" for number in range(1, len(admitted) + 1)]
    finally:
        file.write_text(before)


FORGETFUL = """
from rlmath.data import DATA_SOURCES

@DATA_SOURCES.register("forgetful")
class Forgetful:
    def __init__(self, options):
        self.row = 0

    def __iter__(self):
        while True:
            self.row += 1
            yield {"prompt": f"{self.row}+1=", "solutions": [str(self.row + 1)]}

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        # The row after two steps of eight problems.
        self.row = state["row"] - (state["row"] == 16)
"""


@pytest.mark.long
def test_rlmath_test_plugin_resumes_a_run_with_it(tmp_path):
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL)
    done = rlmath("test", "plugin", str(file), "--out", str(tmp_path / "out"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ok      data source forgetful: resumes at the same row" in done.stdout
    assert "ok      all parts: a run of steps holds its invariants" in done.stdout
    assert "FAILED  all parts: a resumed run is equal to the last bit" in done.stdout
    assert "step 3 differs in" in done.stdout
