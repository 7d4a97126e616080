import dataclasses

import pytest
from config_cases import CPU_MACHINE, GPU_MACHINE, QWEN_1_5B, set_values

from rlmath.checks.fp8_training import fp8_model, fp8_problems
from rlmath.checks.pairs import pair_problems
from rlmath.checks.run import find_problems
from rlmath.config.actor import Fp8, Fp8Recipe
from rlmath.config.load import load
from rlmath.config.schema import Config, Device, DType, Layers
from rlmath.model.parallel import Layout
from rlmath.model.spec import model_spec

HOPPER = dataclasses.replace(GPU_MACHINE, compute_capability=(9, 0))


def config():
    made = Config()
    made.actor.fp8 = Fp8.hybrid
    made.algorithm.correction.kind = "token_truncate"
    return made


def problems(made, command="train", machine=HOPPER):
    found = fp8_problems(made, machine, Device.cuda, command)
    return [*pair_problems(made, Device.cuda, command), *found]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"algorithm.correction.kind": "none"}, "with actor.fp8=hybrid; use token"),
        ({"actor.layers": Layers.local}, "actor.layers=local: only Transformer Engine"),
        ({"model.dtype": DType.float32}, "use bfloat16"),
        ({"precision.batch_invariant": True}, "use one of the two"),
        ({"actor.fp8_recipe": Fp8Recipe.mxfp8}, "has 9.0; use blockwise"),
    ],
    ids=str,
)
def test_fp8_refuses_incompatible_settings(changes, part):
    made = config()
    assert not problems(made)
    set_values(made, changes)
    (message,) = problems(made)
    assert message.startswith(("actor.fp8", "algorithm.correction")) and part in message
    assert not problems(made, "evaluate")
    made.actor.fp8 = Fp8.none
    assert not problems(made)


def test_fp8_refuses_cpu_and_old_gpus():
    assert not list(fp8_problems(config(), CPU_MACHINE, Device.cpu, "train"))
    (message,) = pair_problems(config(), Device.cpu, "train")
    assert message.startswith("actor.fp8=hybrid with cluster.device=cpu")
    old = dataclasses.replace(GPU_MACHINE, compute_capability=(8, 0))
    (message,) = problems(config(), machine=old)
    assert "this one has 8.0" in message
    # Nothing is known here of other machines: their ranks look.
    made = config()
    made.cluster.ray_address = "auto"
    assert not problems(made, machine=old)
    assert not problems(config(), machine=GPU_MACHINE)
    assert old.with_gpus(8).compute_capability is None
    uncorrected = config()
    uncorrected.algorithm.correction.kind = "none"
    assert not problems(uncorrected, "sft"), "without engines there is nothing to correct"


def test_fp8_refuses_model_sizes_off_the_block():
    made = config()
    model = dataclasses.replace(model_spec(QWEN_1_5B), ffn=8960 + 8)
    (message,) = fp8_model(made, model, Layout(1, 1, 1))
    assert message.startswith("actor.fp8_recipe=blockwise: mlp.linear_fc2 has 8968 columns")
    assert not [*fp8_model(made, model_spec(QWEN_1_5B), Layout(2, 1, 1))]
    made.actor.fp8 = Fp8.none
    assert not [*fp8_model(made, model, Layout(1, 1, 1))]


def test_train_and_sft_refuse_fp8_on_cpu(tmp_path):
    settings = [f"model.path={tmp_path}", f"runner.run_dir={tmp_path}/run", "actor.fp8=e4m3"]
    loaded = load(settings)
    loaded.cluster.device = Device.cpu
    for command in ("train", "sft"):
        assert any("actor.fp8=e4m3" in one for one in find_problems(loaded, command, CPU_MACHINE))
    assert not any("actor.fp8" in one for one in find_problems(loaded, "evaluate", CPU_MACHINE))
