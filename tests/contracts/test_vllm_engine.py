"""What engines rely on in vLLM: how it chooses GPUs, sizes its cache, and schedules ahead."""

import pytest
import torch

from rlmath.model.tiny import make_tiny_model
from rlmath.rollout.engine_arguments import vllm_arguments
from rlmath.rollout.requests import FLASHINFER_VARIABLES, EngineSpec
from tests.contracts.contract import Row, check, parametrized

GPUS = "a wide engine's workers sit on GPUs of other processes (rlmath/rollout/engine_arguments.py)"
CACHE = "an engine that starts again gets a KV cache of another size (rlmath/rollout/pool.py)"
AHEAD = "a step is in flight while weights change (rlmath/rollout/step_loop.py)"
FOLDERS = "engines of a node write to one folder (rlmath/rollout/engine_arguments.py)"
INVARIANT = "precision.batch_invariant is not what it says (rlmath/vllm_plugin/engine_precision.py)"
START = "engines start in the wrong order, or too early (rlmath/training/session.py)"
IMPORTS = "engines start seconds later (rlmath/rollout/step_loop.py)"
WARM_UP = "the bound of max_num_batched_tokens is wrong (rlmath/rollout/engine_arguments.py)"
ROUTES = "routes of an MoE with the samples (rlmath/rollout/routes.py)"
CONNECTOR = "vllm.distributed.aux_output_connector"
LOOP = "samples cannot be read from the engine's core (rlmath/rollout/step_loop.py)"

INSIDE = "a gate that fails names no layer (rlmath/validation/engine_values.py)"
SCORES = "a teacher's log-probs are of other tokens (rlmath/rollout/step_loop.py)"

WORKER = "vllm.v1.worker.gpu_worker:Worker"
CORE = "vllm.v1.engine.core:EngineCore"

ROWS = [
    # GPUs of an engine.
    Row(
        "vllm.platforms.cuda:CudaPlatformBase.device_control_env_var",
        equals="CUDA_VISIBLE_DEVICES",
        breaks=GPUS,
    ),
    Row(
        "vllm.platforms.cuda:NvmlCudaPlatform.device_control_id_to_physical_device_id",
        takes=("device_id",),
        says=("return int(device_id)", "nvmlDeviceGetHandleByUUID"),
        breaks=GPUS,
    ),
    Row(
        f"{WORKER}.init_device",
        says=(
            "set_assigned_physical_gpu_ids(assigned_physical_gpu_ids)",
            "current_platform.logical_device_id_to_visible_device_id(self.local_rank)",
        ),
        breaks=GPUS,
    ),
    Row(WORKER, has=("device", "model_runner"), breaks=GPUS),
    Row(
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main",
        says=("set_assigned_physical_gpu_ids(assigned_physical_gpu_ids)",),
        breaks=GPUS,
    ),
    Row(
        "vllm.v1.executor.abstract:Executor.get_class",
        says=('== "mp"', "MultiprocExecutor", '== "uni"', "UniProcExecutor"),
        breaks=GPUS,
    ),
    # What is left in the prefix cache after a reset (rlmath/rollout/engine_workers.py).
    Row(
        "vllm.v1.core.block_pool:BlockPool",
        has=("cached_block_hash_to_block",),
        breaks="the check that a weight sync leaves no prefixes of the old weights",
    ),
    Row(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        has=("block_pool",),
        breaks="the check that a weight sync leaves no prefixes of the old weights",
    ),
    # What a gate that fails looks at (rlmath/validation/engine_values.py).
    Row(
        "vllm.v1.engine.llm_engine:LLMEngine",
        has=("add_request", "step", "has_unfinished_requests"),
        breaks=INSIDE,
    ),
    Row(
        "vllm.v1.engine.llm_engine:LLMEngine.add_request",
        takes=("request_id", "prompt", "params"),
        breaks=INSIDE,
    ),
    Row(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        has=("num_heads", "num_kv_heads", "num_kv_head_replicas", "head_size", "tp_rank"),
        breaks=INSIDE,
    ),
    Row(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        has=("forward",),
        breaks=INSIDE,
    ),
    # A drill begins an update after one that failed (rlmath/commands/drill/in_ranks.py).
    Row(
        f"{WORKER}.finish_weight_update",
        says=("reset_weight_update_target()", "self._weight_update_active = False"),
        breaks="a drill's next fault has engines that take no weights",
    ),
    # Memory.
    Row(
        f"{WORKER}.determine_available_memory",
        says=(
            "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:",
            "self.available_kv_cache_memory_bytes = (",
            "self.requested_memory\n            - profile_result.non_kv_cache_memory",
        ),
        breaks=CACHE,
    ),
    Row(
        "vllm.v1.worker.utils:request_memory",
        says=("if init_snapshot.free_memory < requested_memory:",),
        breaks=START,
    ),
    Row(
        "vllm.utils.mem_utils:memory_profiling",
        says=("result.before_create.free_memory - result.after_profile.free_memory",),
        breaks=START,
    ),
    Row(
        "vllm.v1.worker.startup_plan:maybe_apply_startup_plan",
        says=("envs.VLLM_ENABLE_STARTUP_PLAN", "kv_cache_memory_bytes is not None"),
        breaks=CACHE,
    ),
    # Steps.
    Row(
        CORE,
        has=("batch_queue", "step_with_batch_queue", "scheduler", "abort_requests"),
        breaks=AHEAD,
    ),
    Row(
        f"{CORE}.step_with_batch_queue",
        says=("batch_queue.pop()", "batch_queue.appendleft("),
        breaks=AHEAD,
    ),
    Row(
        "vllm.v1.engine.core_client:InprocClient",
        has=("engine_core", "get_output", "add_request", "abort_requests", "shutdown"),
        breaks=AHEAD,
    ),
    Row(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        says=("if request is None or request.is_finished():",),
        breaks="what a step in flight gives for an aborted request is taken for a sample's",
    ),
    Row(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        says=("scheduler_config.async_scheduling = False",),
        breaks="rollout.async_scheduling could be offered on CPU (rlmath/checks/layout.py)",
    ),
    Row(
        "vllm.v1.engine:EngineCoreOutput",
        fields=(
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "finish_reason",
            "routed_experts",
        ),
        breaks=LOOP,
    ),
    # Routes of an MoE: which rows come, of which tokens, and where vLLM refuses them.
    Row(
        "vllm.engine.arg_utils:EngineArgs",
        ROUTES,
        fields=("enable_return_routed_experts",),
        says=("self.aux_output_config.enable_return_routed_experts = True",),
    ),
    Row(
        "vllm.config.vllm:VllmConfig._verify_aux_output_compatibility",
        f"{ROUTES}: rlmath/checks/routing.py says what they need",
        says=(
            "if not self.use_v2_model_runner",
            "if not self.cache_config.enable_prefix_caching",
        ),
    ),
    Row(
        f"{CONNECTOR}.connector:AuxOutputSchedulerConnector.build_connector_meta",
        f"{ROUTES}: from this token on before the first answer, then from the last but one",
        takes=("scheduler_output", "requests"),
        says=(
            "request.sampling_params.routed_experts_prompt_start",
            "0 if request.num_output_tokens == 0 else request.num_tokens - 1",
        ),
    ),
    Row(
        f"{CONNECTOR}.connector:AuxOutputSchedulerConnector.take_output",
        f"{ROUTES}: the rows up to the last token, which went through no layer",
        takes=("request", "output"),
        says=("token_end = request.num_tokens - 1", "request_output.rows[:local_end]"),
    ),
    Row(
        "vllm.v1.engine.output_processor:RequestState",
        f"{ROUTES}: those of a request's answers follow each other",
        says=("np.concatenate(self.routed_experts_chunks, axis=0)",),
    ),
    Row(
        f"{CONNECTOR}.worker:AuxOutputWorkerConnector._commit_output",
        f"{ROUTES}: on CUDA those of a cached prefix come from blocks that were kept",
        says=("materialize_routed_experts", "rows = routed_experts[start : end - rejected]"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer",
        f"{ROUTES}: a row has all layers of the model, each at its number",
        takes=("max_num_batched_tokens", "vllm_config"),
        has=("snapshot_routing_data", "shape_per_token", "output_dtype_name"),
        says=(
            "self.shape_per_token = (num_layers, num_experts_per_tok)",
            'self.output_dtype_name = "uint8" if num_experts <= 256 else "uint16"',
            "self.device_buffer[: len(local_topk_ids), layer_id] = local_topk_ids",
        ),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
        f"{ROUTES}: of the model's experts, not of copies that balance their load",
        has=("set_capture_fn", "capture_fn"),
        says=("self.capture_fn(topk_ids)", "topk_ids = self._apply_eplb_mapping(topk_ids)"),
    ),
    # A teacher's log-probs: of all tokens of a prompt but the first, at temperature 1.
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        says=(
            "num_prompt_tokens - 1, num_prompt_logprobs + 1",
            "tgt_token_ids = prompt_token_ids[start_tok : start_tok + num_logits]",
            "scores = self.sampler.compute_logprobs(logits)",
        ),
        breaks=SCORES,
    ),
    Row(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        says=("assert not prompt_logprobs_tensors",),
        breaks=f"{SCORES}: they come in parts",
    ),
    Row(
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        says=(
            "list[Annotated[int, Field(ge=0)]]",
            "prompt_logprobs: int | None = None",
            "max_tokens: int | None",
        ),
        breaks="a teacher's server is asked for something else (rlmath/rollout/teacher_server.py)",
    ),
    Row(
        "vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice",
        says=("prompt_logprobs: list[dict[int, Logprob] | None] | None",),
        breaks="a teacher's server answers otherwise (rlmath/rollout/teacher_server.py)",
    ),
    Row(
        "vllm.v1.engine.llm_engine:LLMEngine",
        has=(
            "vllm_config",
            "engine_core",
            "input_processor",
            "collective_rpc",
            "get_tokenizer",
            "get_supported_tasks",
            "reset_prefix_cache",
            "set_weight_version",
            "sleep",
            "wake_up",
        ),
        breaks=LOOP,
    ),
    Row(
        "vllm.sampling_params:SamplingParams",
        takes=(
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "ignore_eos",
            "logprobs",
            "prompt_logprobs",
            "detokenize",
            "output_kind",
            "routed_experts_prompt_start",
            "skip_clone",
        ),
        breaks=LOOP,
    ),
    # CUDA engines take the second model runner, CPU engines the first.
    *(
        Row(
            f"{runner}:GPUModelRunner",
            has=("get_model", "model_config"),
            breaks="an engine's precision is unchecked (rlmath/vllm_plugin/engine_precision.py)",
        )
        for runner in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")
    ),
    # Compiled code.
    Row(
        "vllm.compilation.backends:CompilerManager.save_to_file",
        says=('open(self.cache_file_path, "w")',),
        breaks="the file is replaced at once now: engines may share a folder"
        " (rlmath/rollout/engine_arguments.py)",
    ),
    Row(
        "vllm.compilation.backends:VllmBackend.__call__",
        says=("envs.VLLM_CACHE_ROOT",),
        breaks=FOLDERS,
    ),
    Row(
        "vllm.compilation.compiler_interface:InductorAdaptor.initialize_cache",
        says=('os.environ.get("TRITON_CACHE_DIR")',),
        breaks=FOLDERS,
    ),
    # What an engine imports before its GPU is free for it.
    Row(
        "vllm.platforms.cuda:CudaPlatformBase.check_and_update_config",
        says=('"vllm.v1.worker.gpu_worker.Worker"',),
        breaks=IMPORTS,
    ),
    Row(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        says=('"vllm.v1.worker.cpu_worker.CPUWorker"',),
        breaks=IMPORTS,
    ),
    # What an engine warms up with: its tables end at the longest sequences.
    Row(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
        says=("num_reqs = min(num_tokens, self.max_num_reqs)", "num_tokens // num_reqs"),
        breaks=WARM_UP,
    ),
    # Batch invariance.
    Row(
        "vllm.model_executor.determinism.batch_invariant",
        has=("_batch_invariant_MODE", "init_batch_invariance", "enable_batch_invariant_mode"),
        breaks=INVARIANT,
    ),
    Row(
        "vllm.model_executor.determinism.batch_invariant:enable_batch_invariant_mode",
        says=("_batch_invariant_MODE = True",),
        breaks=INVARIANT,
    ),
    Row(
        "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
        says=("init_batch_invariance()",),
        breaks=INVARIANT,
    ),
    Row(
        "vllm.envs:environment_variables",
        has=("VLLM_BATCH_INVARIANT", "VLLM_CACHE_ROOT", "VLLM_ENABLE_STARTUP_PLAN"),
        breaks=f"{INVARIANT}; {FOLDERS}; {CACHE}",
    ),
    Row(
        "vllm.envs:environment_variables",
        has=FLASHINFER_VARIABLES,
        breaks="rollout.flashinfer does nothing (rlmath/rollout/requests.py)",
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler:flashinfer_sampler_supported",
        says=('if envs.is_set("VLLM_USE_FLASHINFER_SAMPLER"):\n        raise RuntimeError(',),
        breaks="rollout.flashinfer=true without nvcc is ignored (rlmath/rollout/requests.py)",
    ),
]


@parametrized(ROWS)
def test_vllm_is_as_engines_need_it(row):
    if row.target == "vllm.envs:environment_variables":
        import vllm.envs

        missing = [name for name in row.has if name not in vllm.envs.environment_variables]
        assert not missing, f"vLLM reads no {missing}: {row.breaks}"
        return
    check(row)


def spec(device, width, model="model", **fields):
    return EngineSpec(
        model_path=model,
        dtype="float32" if device == "cpu" else "bfloat16",
        device=device,
        tensor_parallel=width,
        max_sequence_tokens=256,
        max_running_sequences=32,
        transport="shared_memory" if device == "cpu" else "ipc",
        log_dir="logs",
        cpu_kv_cache_gib=0.125,
        **fields,
    )


@pytest.fixture
def cuda_names(monkeypatch):
    """vLLM's names of devices, as its CUDA platforms take them from their common base."""
    from vllm.engine import arg_utils
    from vllm.platforms import interface

    class CudaNames(interface.Platform):
        device_name = "cuda"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setattr(arg_utils, "current_platform", CudaNames)
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    return CudaNames


@pytest.mark.parametrize(
    ("visible", "of_torch"),
    [(None, [6, 4]), ("4,5,6,7", [2, 0]), ("6,4", [0, 1])],
    ids=["Ray sets nothing", "the node has half of its GPUs", "the engine's own"],
)
def test_an_engine_finds_its_gpus_by_their_numbers_on_the_node(
    cuda_names, monkeypatch, visible, of_torch
):
    """``device_ids`` as strings name GPUs of the node, whatever CUDA_VISIBLE_DEVICES hides, and the
    worker of rank r takes the r-th of them; ``worker_gpu`` finds its number again."""
    from vllm.platforms import interface

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    arguments = vllm_arguments(spec("cuda", 2, device_ids=("6", "4")))
    assert arguments.distributed_executor_backend == "mp"
    assigned = arguments._resolve_device_ids()
    assert assigned == [6, 4]
    interface.set_assigned_physical_gpu_ids(assigned)
    ordinals = [cuda_names.logical_device_id_to_visible_device_id(rank) for rank in range(2)]
    assert ordinals == of_torch
    found = [cuda_names.visible_device_id_to_physical_device_id(ordinal) for ordinal in ordinals]
    assert found == [6, 4]


@pytest.mark.usefixtures("cuda_names")
def test_numbers_would_be_places_among_the_visible_gpus(monkeypatch):
    """Why ``device_ids`` are strings."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    arguments = vllm_arguments(spec("cuda", 2, device_ids=("2", "3")))
    assert arguments._resolve_device_ids() == [2, 3]
    arguments.device_ids = [2, 3]
    assert arguments._resolve_device_ids() == [6, 7]


def test_arguments_of_a_cuda_engine():
    given = vllm_arguments(
        spec("cuda", 1, max_batched_tokens=8192, async_scheduling=True, kv_cache_bytes=5)
    )
    assert given.distributed_executor_backend == "uni"
    assert (given.max_num_batched_tokens, given.async_scheduling) == (8192, True)
    assert (given.kv_cache_memory_bytes, given.device_ids) == (5, None)
    assert given.enable_chunked_prefill and given.scheduler_cls is None


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="a CPU engine needs vLLM's CPU build; the CUDA build is installed here",
)
def test_a_cpu_engine_is_configured_as_it_was_asked(tmp_path):
    """Prompts whole, nothing scheduled ahead, workers of vLLM's own."""
    model = make_tiny_model(tmp_path / "model")
    config = vllm_arguments(spec("cpu", 2, str(model))).create_engine_config()
    assert config.parallel_config.distributed_executor_backend == "mp"
    assert config.parallel_config.assigned_physical_gpu_ids is None
    assert config.scheduler_config.max_num_batched_tokens == 4096
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.async_scheduling is False
    assert config.max_concurrent_batches == 1
    assert config.cache_config.kv_cache_memory_bytes == 2**27
