"""Set-up of an engine: from the settings to its specification, environment and folders."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmath.commands.plan.engine_memory import ENGINE_STEP_TOKENS
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.lora import LoraRollout
from rlmath.config.rollout import Quantization
from rlmath.config.schema import Device
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.engine_arguments import (
    ASYNC_SCHEDULER,
    adapter_arguments,
    cache_archive,
    cache_folder,
    cuda_arguments,
)
from rlmath.engines.engine_workers import check_gpus
from rlmath.engines.requests import FLASHINFER_VARIABLES
from rlmath.engines.routes import RouteSpec
from rlmath.engines.step_loop import StepLoop
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.precision import Precision
from rlmath.model.published import published_config
from rlmath.model.tiny import make_tiny_model
from rlmath.training import engine_settings
from rlmath.training.engine_settings import engine_spec
from rlmath.utils.node_cache import node_cache, save


def spec_of(device, *overrides):
    config = load(["model=tiny", "cluster=gpu8", "runner.run_dir=r", *overrides])
    # The specification reads nothing of the model's folder but its name.
    return engine_spec(config, resolve_layout(config, device), trains=False)


@pytest.fixture(autouse=True)
def dense_model(monkeypatch):
    monkeypatch.setattr(engine_settings, "precision", lambda config: Precision())


def test_async_scheduling_defaults_to_cuda_only():
    assert spec_of(Device.cuda).async_scheduling
    assert not spec_of(Device.cpu, "cluster=local").async_scheduling
    assert not spec_of(Device.cuda, "rollout.async_scheduling=false").async_scheduling


def test_prefixes_are_kept_on_cpu_unless_the_model_has_states(tmp_path):
    prompts = "data.max_prompt_tokens=512"
    assert spec_of(Device.cpu, "cluster=local", prompts).prefix_caching
    config = published_config("Qwen3.5-9B")
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = f"model.path={tmp_path}"
    assert not spec_of(Device.cpu, "cluster=local", prompts, path).prefix_caching
    assert spec_of(Device.cuda, prompts, path).prefix_caching


def test_short_steps_default_to_cpu_only():
    assert spec_of(Device.cpu, "cluster=local").short_steps
    assert not spec_of(Device.cuda).short_steps
    chosen = spec_of(Device.cuda, "rollout.short_steps=true")
    assert cuda_arguments(chosen)["scheduler_cls"] == ASYNC_SCHEDULER
    assert cuda_arguments(replace(chosen, short_steps=False))["scheduler_cls"] is None


def test_a_step_of_an_engine_is_as_long_as_the_plan_assumes():
    assert spec_of(Device.cuda).max_batched_tokens == ENGINE_STEP_TOKENS == 16384
    assert spec_of(Device.cuda, "rollout.max_batched_tokens=4096").max_batched_tokens == 4096


def test_vllm_gets_gpus_step_budget_and_schedule(gpu_spec):
    spec = replace(gpu_spec, device_ids=("6", "4"), max_batched_tokens=4096, async_scheduling=True)
    told = cuda_arguments(spec)
    assert told["device_ids"] == ["6", "4"]
    assert told["max_num_batched_tokens"] == 4096
    assert told["async_scheduling"] is True
    assert cuda_arguments(replace(spec, async_scheduling=False))["async_scheduling"] is False
    assert cuda_arguments(replace(spec, device_ids=()))["device_ids"] is None


def test_a_step_is_no_longer_than_all_sequences_together(gpu_spec):
    """vLLM warms up with that many tokens, and its tables end where the longest sequences do."""
    small = replace(gpu_spec, max_running_sequences=32, max_sequence_tokens=128)
    assert small.max_batched_tokens > 32 * 128
    assert cuda_arguments(small)["max_num_batched_tokens"] == 32 * 128


def test_an_engine_that_starts_again_is_not_refused_for_memory_that_ranks_took_since(gpu_spec):
    assert cuda_arguments(gpu_spec)["gpu_memory_utilization"] == gpu_spec.gpu_memory_utilization
    again = cuda_arguments(replace(gpu_spec, kv_cache_bytes=7 * 2**30))
    assert again["kv_cache_memory_bytes"] == 7 * 2**30
    assert 0 < again["gpu_memory_utilization"] < 0.05


def test_an_engine_on_a_gpu_sees_its_gpus_and_measures_its_own_cache(gpu_spec):
    environment = gpu_spec.environment()
    assert environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
    assert environment["VLLM_ENABLE_STARTUP_PLAN"] == "0"
    assert not any("BUNDLE" in name for name in environment)
    assert "VLLM_ENABLE_STARTUP_PLAN" not in replace(gpu_spec, device="cpu").environment()


def test_an_engine_runs_batch_invariant_kernels_as_the_setting_says(gpu_spec):
    for on in (False, True):
        spec = replace(gpu_spec, precision=Precision(batch_invariant=on))
        # Said outright: what the shell has does not count.
        assert spec.environment()["VLLM_BATCH_INVARIANT"] == str(int(on))


@pytest.mark.parametrize("on", [True, False])
def test_flashinfer_is_decided_by_the_setting(on):
    """And not by whether ninja and nvcc happen to be on PATH."""
    environment = spec_of(Device.cuda, f"rollout.flashinfer={on}").environment()
    assert {environment[name] for name in FLASHINFER_VARIABLES} == {str(int(on))}
    assert not set(FLASHINFER_VARIABLES) & set(spec_of(Device.cpu).environment())


def test_an_engine_returns_routes_where_it_is_asked_to(gpu_spec):
    routed = replace(gpu_spec, routes=RouteSpec((0, 1), 8, 2))
    for spec, on in ((gpu_spec, False), (routed, True)):
        assert cuda_arguments(spec)["enable_return_routed_experts"] is on
        assert replace(spec, device="cpu").environment()["RLMATH_ROUTES"] == str(int(on))


def test_a_teachers_engine_reads_whole_sequences_and_keeps_nothing(tmp_path):
    folder = make_tiny_model(tmp_path / "teacher")
    given = ["model=tiny", "cluster=gpu8", "runner.run_dir=r", "rollout.max_response_tokens=100"]
    config = load(
        [
            *(*given, "data.max_prompt_tokens=50", "algorithm.distill_coef=1"),
            *(f"teacher.path={folder}", "teacher.tensor_parallel=2", "teacher.dtype=float32"),
            *("teacher.max_batched_tokens=512", "teacher.gpu_memory_utilization=0.7"),
        ]
    )
    layout = resolve_layout(config, Device.cuda)
    spec = engine_settings.teacher_spec(config, layout)
    assert (spec.model_path, spec.dtype, spec.tensor_parallel) == (str(folder), "float32", 2)
    assert spec.max_sequence_tokens == 50 + 100 + 1
    assert (spec.max_batched_tokens, spec.gpu_memory_utilization) == (512, 0.7)
    assert not (spec.sleeps or spec.prefix_caching or spec.async_scheduling)
    rollout = engine_spec(config, layout, trains=True)
    assert spec.log_path(0) != rollout.log_path(0)
    assert spec.role != rollout.role


def test_adapters_that_engines_compute_are_in_vllms_arguments(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    lora = [f"model.path={folder}", "actor.lora.rank=12", "actor.lora.targets=[v_proj,q_proj]"]
    config = load(["model=tiny", "cluster=gpu8", "runner.run_dir=r", *lora])
    layout = resolve_layout(config, Device.cuda)
    spec = engine_spec(config, layout, trains=True)
    assert spec.adapters is None and spec.transfer_backend == "ipc"
    assert adapter_arguments(spec.adapters) == {}
    config.actor.lora.rollout = LoraRollout.unmerged
    spec = engine_spec(config, layout, trains=True)
    assert spec.transfer_backend == "ipc_adapters"
    apart = replace(spec, transport="nccl")
    assert apart.transfer_backend == "nccl_adapters"
    assert replace(apart, adapters=None).transfer_backend == "nccl_shares"
    assert adapter_arguments(spec.adapters) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    # A teacher has none, and neither has an engine that evaluates a folder.
    config.teacher.path = str(folder)
    assert engine_settings.teacher_spec(config, layout).adapters is None
    assert engine_spec(config, layout, trains=False).adapters is None


@pytest.mark.parametrize(("adapters", "level"), [(None, 2), (Lora(4, 8.0, TARGETS), 1)])
def test_a_sleeping_engine_keeps_the_base_model_that_is_never_sent_again(gpu_spec, adapters, level):
    engine = RolloutEngine.__new__(RolloutEngine)
    engine._spec, engine._index = replace(gpu_spec, sleeps=True, adapters=adapters), 0
    slept = []
    vllm = SimpleNamespace(sleep=lambda level: slept.append(level))
    engine._loop = SimpleNamespace(
        counts=lambda: (0, 0), drain=lambda: None, engine_call=lambda function: function(vllm)
    )
    engine.sleep()
    assert slept == [level] and not engine._weights_valid


def test_engines_of_a_run_quantize_and_its_teachers_do_not(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = load(["model=tiny", "cluster=gpu8", "runner.run_dir=r", "rollout.quantization=fp8"])
    config.teacher.path = str(folder)
    layout = resolve_layout(config, Device.cuda)
    assert engine_spec(config, layout, trains=True).quantization is Quantization.fp8
    assert engine_settings.teacher_spec(config, layout).quantization is Quantization.none


def test_no_two_engines_or_runs_write_to_one_folder_of_compiled_code(
    monkeypatch, tmp_path, gpu_spec
):
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = replace(gpu_spec, log_dir=str(tmp_path / "run" / "logs"))
    (tmp_path / "run").mkdir()

    def engine(number, role="engine"):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        _, lock = cache_folder(replace(run, role=role), number)
        return lock, [os.environ[name] for name in names]

    # Two runs on one node number their engines alike, and the teacher's are apart.
    engines = [engine(number) for number in (0, 1, 0, 1)] + [engine(0, "teacher")]
    used = [folder for _, of_engine in engines for folder in of_engine]
    assert len(set(used)) == len(used) == 15
    # On the node's own disk.
    assert all(Path(folder).is_relative_to(node_cache()) for folder in used)
    # The next run finds what this one compiled, on the GPU where it did.
    engines[1][0].close()
    assert engine(1)[1] == engines[1][1]
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    assert cache_folder(replace(run, device_ids=("6", "7")), 0)[0].name == "rlmath_engine_6"
    # A new node begins with what another one compiled.
    (Path(engines[0][1][0]) / "graph").write_text("compiled")
    save(Path(engines[0][1][0]), cache_archive(run))
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    folder, _ = cache_folder(replace(run, device_ids=("5",)), 0)
    assert (folder / "graph").read_text() == "compiled"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    folder, lock = cache_folder(run, 0)
    assert lock is None and str(folder) == os.environ["VLLM_CACHE_ROOT"] and folder.is_dir()


def test_workers_on_other_gpus_than_reserved_are_refused():
    check_gpus([6, 4], [6, 4], ("6", "4"))
    for found, assigned in (([0, 1], [6, 7]), ([7, 6], [6, 7]), ([0, 1], None)):
        with pytest.raises(RuntimeError, match=r"GPUs 6, 7 .* use \[\d, \d\]"):
            check_gpus(found, assigned, ("6", "7"))


def test_each_worker_of_an_engine_is_bound_beside_its_gpu(gpu_spec, monkeypatch):
    """Before it pins memory for a sleep or a weight sync."""
    bound = []
    monkeypatch.setattr("rlmath.device.numa.bind_to_gpu", bound.append)
    monkeypatch.setattr("rlmath.engines.step_loop.check_workers", lambda *_: None)
    workers = [SimpleNamespace(device=SimpleNamespace(index=index)) for index in (0, 1)]
    answers = {
        "worker_precision": [None] * 2,
        "worker_gpu": [6, 4],
        "worker_kv_cache_bytes": [9, 8],
    }

    def collective_rpc(asked):
        return answers.get(asked.__name__) or [asked(worker) for worker in workers]

    loop = StepLoop(gpu_spec, 0)
    given = SimpleNamespace(parallel_config=SimpleNamespace(assigned_physical_gpu_ids=[6, 4]))
    loop._engine = SimpleNamespace(collective_rpc=collective_rpc, vllm_config=given)
    loop._ask_workers(replace(gpu_spec, device_ids=("6", "4"), kv_cache_bytes=None))
    assert bound == [0, 1] and loop.kv_cache_bytes == 8
