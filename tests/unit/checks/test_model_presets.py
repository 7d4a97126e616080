"""Each preset of a model names its family and a layout that the plan of weights accepts."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_cases import GPU_MACHINE

from rlmath.checks.run import check
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.model.families import family_of
from rlmath.model.folder import TINY
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from tests.support.planned_gathers import planned_gathers


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
