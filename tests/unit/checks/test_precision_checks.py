import dataclasses

import pytest
from config_cases import CPU_MACHINE, GPU_MACHINE, QWEN_1_5B

from rlmath.checks.pairs import pair_problems
from rlmath.checks.precision import (
    batch_invariance,
    batch_invariant_model,
    context_attention,
    layers,
)
from rlmath.checks.run import find_problems
from rlmath.config.load import load
from rlmath.config.schema import Config, Device, DType, Layers, Logits
from rlmath.model.spec import model_spec

BROKEN = "its extension for torch, transformer_engine_torch*.so, was not built"
WITHOUT = dataclasses.replace(GPU_MACHINE, transformer_engine=BROKEN)


def config(*, dtype=DType.bfloat16, invariant=False, **actor):
    made = Config()
    made.model.dtype, made.precision.batch_invariant = dtype, invariant
    for name, value in actor.items():
        setattr(made.actor, name, value)
    return made


def invariance(made, machine, device, command):
    found = batch_invariance(made, machine, device, command)
    return [*pair_problems(made, device, command), *found]


def test_cuda_without_transformer_engine_is_refused_by_every_command_that_trains(tmp_path):
    settings = [f"model.path={tmp_path}", f"runner.run_dir={tmp_path}/run", "cluster=gpu8"]
    loaded = load(settings)
    for command in ("train", "sft"):
        message = "\n".join(find_problems(loaded, command, WITHOUT))
        for part in (BROKEN, "launchers/setup.sh cuda", "actor.layers=local", "Adam"):
            assert part in message
    assert "actor.layers" not in "\n".join(find_problems(loaded, "evaluate", WITHOUT))
    loaded.cluster.device = Device.auto
    assert BROKEN in "\n".join(find_problems(loaded, "train", WITHOUT))
    loaded.precision.batch_invariant, loaded.actor.context_parallel = True, 2
    assert "precision.batch_invariant" in "\n".join(find_problems(loaded, "train", GPU_MACHINE))


def test_local_layers_are_taken_when_asked_for():
    assert list(layers(config(), WITHOUT, Device.cuda))
    assert list(layers(config(layers=Layers.transformer_engine), WITHOUT, Device.cuda))
    assert not list(layers(config(layers=Layers.local), WITHOUT, Device.cuda))
    assert not list(layers(config(), GPU_MACHINE, Device.cuda))


def test_transformer_engine_on_a_cpu_is_refused():
    (message,) = pair_problems(config(layers=Layers.transformer_engine), Device.cpu, "train")
    assert "actor.layers=transformer_engine" in message and "CUDA only" in message
    for chosen in (Layers.auto, Layers.local):
        assert not list(pair_problems(config(layers=chosen), Device.cpu, "train"))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"layers": Layers.local}, "actor.layers=local"),
        ({"context_parallel": 2}, "actor.context_parallel=1"),
        ({"tensor_parallel": 4}, "use at most 2"),
        ({"dtype": DType.float32}, "model.dtype=float32"),
    ],
)
def test_batch_invariance_refuses_unsupported_settings(changed, part):
    (message,) = invariance(config(invariant=True, **changed), GPU_MACHINE, Device.cuda, "train")
    assert message.startswith("precision.batch_invariant=true") and part in message
    assert not list(batch_invariance(config(**changed), GPU_MACHINE, Device.cuda, "train"))


def test_batch_invariance_where_it_holds():
    asked = config(invariant=True, tensor_parallel=2, pipeline_parallel=2)
    assert not list(batch_invariance(asked, GPU_MACHINE, Device.cuda, "train"))
    # Engines alone: nothing of the actor matters.
    asked.actor.context_parallel = 2
    assert not list(batch_invariance(asked, GPU_MACHINE, Device.cuda, "evaluate"))


def test_batch_invariance_on_a_cpu_without_flash_attention_and_of_experts():
    asked = config(invariant=True)
    (message,) = invariance(asked, CPU_MACHINE, Device.cpu, "train")
    assert "the kernels are CUDA's" in message
    without = dataclasses.replace(GPU_MACHINE, flash_attention=False)
    (message,) = batch_invariance(asked, without, Device.cuda, "train")
    assert "flash-attn==2.8.3" in message
    dense = model_spec(QWEN_1_5B)
    assert not list(batch_invariant_model(asked, dense))
    (message,) = batch_invariant_model(asked, dataclasses.replace(dense, experts=64))
    assert "64 experts have no batch-invariant" in message


def test_triton_kernels_need_a_gpu():
    asked = config()
    assert not list(pair_problems(asked, Device.cpu, "train"))
    asked.actor.logits = Logits.triton
    (message,) = pair_problems(asked, Device.cpu, "train")
    assert message.startswith("actor.logits=triton") and "use chunked" in message
    assert not list(pair_problems(asked, Device.cuda, "train"))
    # Engines alone.
    assert not list(pair_problems(asked, Device.cpu, "evaluate"))


def test_local_layers_in_float32_have_no_attention_on_a_gpu():
    made = config(dtype=DType.float32, layers=Layers.local)
    (message,) = context_attention(made, Device.cuda, "train")
    assert "model.dtype=float32" in message and "actor.layers=auto" in message
    assert not list(context_attention(made, Device.cpu, "train"))
    assert not list(context_attention(config(layers=Layers.local), Device.cuda, "train"))


def test_context_parallel_float32_has_no_attention_on_transformer_engine(tmp_path):
    wide = {"context_parallel": 2, "dtype": DType.float32}
    (message,) = context_attention(config(**wide), Device.cuda, "sft")
    for part in ("model.dtype=float32", "actor.context_parallel=2", "use bfloat16", "layers=local"):
        assert part in message
    for made, device, command in (
        (config(context_parallel=2), Device.cuda, "train"),
        (config(dtype=DType.float32), Device.cuda, "train"),
        (config(**wide, layers=Layers.local), Device.cuda, "train"),
        (config(**wide), Device.cpu, "train"),
        (config(**wide), Device.cuda, "evaluate"),
    ):
        assert not list(context_attention(made, device, command))
    given = ["cluster=gpu8", "model.dtype=float32", "actor.context_parallel=2"]
    loaded = load([f"model.path={tmp_path}", f"runner.run_dir={tmp_path}/run", *given])
    assert message in list(find_problems(loaded, "train", GPU_MACHINE))
