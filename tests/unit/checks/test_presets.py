"""Every file of conf/ resolves; every experiment passes the checks and shows its arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_cases import CPU_MACHINE, GPU_MACHINE, QWEN_1_5B, QWEN_7B

from rlmath.checks.run import check
from rlmath.config.arithmetic import batch_of, describe, resolve_layout
from rlmath.config.groups import CONF_DIR, options
from rlmath.config.load import load
from rlmath.model.families import family_of
from rlmath.model.folder import TINY
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from tests.support.planned_gathers import planned_gathers

# Too slow to run after each change.
pytestmark = pytest.mark.process

GROUPS = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir())
RECIPES = {
    "qwen2.5-1.5b-grpo-megatron": QWEN_1_5B,
    "qwen2.5-7b-grpo-megatron": QWEN_7B,
    # On a CPU as well: any model whose sequences are long enough.
    "speed_trl_async": {**QWEN_1_5B, "num_hidden_layers": 2, "vocab_size": 1024},
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_resolves(group):
    names = options(group)
    assert names
    for name in names:
        load([f"{group}={name}", "model.path=m", "runner.run_dir=r"])


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_passes_the_checks(name, tmp_path, make_model, make_data):
    """With a model's folder and a data file in place of those that the experiment names."""
    row = {"prompt": "1+1", "solutions": ["2"], "question": "1+1", "answer": "#### 2"}
    overrides = [f"experiment={name}", f"data.train_paths=[{make_data(row)}]"]
    overrides += ["data.eval_paths=[]", "eval.benchmarks=[]", f"runner.run_dir={tmp_path / 'run'}"]
    tiny = "tiny" if name not in RECIPES else make_model(RECIPES[name])
    config = load([*overrides, f"model.path={tiny}"])
    check(config, "train", CPU_MACHINE)
    device = CPU_MACHINE.device(config.cluster.device)
    layout = resolve_layout(config, device)
    batch = batch_of(config, layout)
    text = describe(config, layout)
    assert batch.divides()
    assert f"= {batch.sequences:,} sequences a step" in text
    assert f" {batch.sequences_per_rank:,} sequences" in text


@pytest.mark.parametrize("name", [name for name in options("model") if name != TINY])
def test_a_preset_has_a_family_and_a_layout_that_the_plan_accepts(
    name, tmp_path, make_model, make_data
):
    settings = [
        f"model={name}",
        "actor=long_context",
        "cluster=gpu8",
        "cluster.nodes=2",
        "cluster.ray_address=auto",
        f"data.train_paths=[{make_data()}]",
        f"runner.run_dir={tmp_path / 'run'}",
        "rollout.max_response_tokens=8192",
    ]
    preset = load(settings)
    sizes = KNOWN[Path(preset.model.path).name]
    assert family_of(str(preset.model.architecture)) == model_spec(sizes).family
    # No network: the folder stands in for the one that the preset names.
    config = load([*settings, f"model.path={make_model(sizes)}"])
    check(config, "train", replace(GPU_MACHINE, disk_bytes=10**14))

    actor, spec = preset.actor, model_spec(sizes)
    layout = Layout(
        actor.tensor_parallel, actor.pipeline_parallel, expert_parallel=actor.expert_parallel
    )
    assert sum(op.numel for op in planned_gathers(spec, layout)) == spec.num_parameters
