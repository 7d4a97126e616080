"""What starting and ending Ray relies on, much of it private, and what is read of transformers."""

from tests.contracts.contract import Row, check, parametrized

SESSION = "Ray for the length of a run (rlmath/cluster/session.py)"
LOOPBACK = f"{SESSION}: it listens on the loopback interface only"
CTRL_C = f"{SESSION}: Ctrl-C reaches the driver alone, which saves"
LEAN = f"{SESSION}: no process of Ray's that a run does not use"
PROCESSES = "ending ranks and engines (rlmath/cluster/processes.py)"
FAILURES = "telling a process that died from an exception (rollout/engine_process.py)"

ROWS = [
    Row("ray._private.ray_constants:ENABLE_RAY_CLUSTER", LOOPBACK),
    Row(
        "ray._private.ray_constants:ENABLE_RAY_CLUSTERS_ENV_VAR",
        LOOPBACK,
        equals="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    ),
    Row("ray._private.services", LOOPBACK, says=("if not ray_constants.ENABLE_RAY_CLUSTER:",)),
    Row("ray._private.services:start_ray_process", CTRL_C, says=("ConsolePopen(",)),
    Row("ray._private.services:ProcessInfo", SESSION, fields=("process",)),
    Row("ray._private.ray_constants:PROCESS_TYPE_GCS_SERVER", SESSION, equals="gcs_server"),
    Row("ray._private.worker", SESSION, has=("_global_node", "print_to_stdstream")),
    Row("ray._private.node:Node", SESSION, has=("all_processes",)),
    Row("ray._private.node:Node.start_monitor", LEAN),
    Row("ray._private.node:Node.start_log_monitor", LEAN),
    Row(
        "ray._private.node:Node.start_api_server",
        LEAN,
        takes=("include_dashboard", "raise_on_failure"),
        says=("self._webui_url",),
    ),
    Row(
        "ray._private.worker:print_to_stdstream",
        f"{SESSION}: errors of workers go to the log",
        passes=("data", "ignore_prefix"),
    ),
    Row(
        "ray:init",
        SESSION,
        takes=(
            "address",
            "num_cpus",
            "object_store_memory",
            "include_dashboard",
            "log_to_driver",
            "logging_level",
        ),
    ),
    Row("ray:kill", PROCESSES, takes=("actor", "no_restart")),
    Row("ray:wait", "answers of ranks and engines", takes=("num_returns", "timeout")),
    Row("ray:get", "answers of ranks and engines", takes=("timeout",)),
    Row("ray.runtime_context:RuntimeContext", PROCESSES, has=("get_node_id",)),
    Row(
        "ray.util.scheduling_strategies:NodeAffinitySchedulingStrategy",
        PROCESSES,
        takes=("node_id", "soft"),
    ),
    Row("ray.exceptions:RayTaskError", FAILURES, has=("cause",)),
    Row(
        "transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS",
        "angles of the actor's rotary embedding (rlmath/actor/model.py)",
    ),
    Row(
        "transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS.llama3",
        "angles of Llama 3's rotary embedding (rlmath/actor/model.py)",
        takes=("config", "device"),
        says=("return inv_freq_llama, attention_factor",),
    ),
    Row(
        "transformers:LlamaConfig",
        "what the angles are computed from (rlmath/actor/model.py)",
        has=("head_dim", "max_position_embeddings", "rope_parameters", "standardize_rope_params"),
    ),
    Row(
        "transformers:Qwen2Config",
        "the tiny model (rlmath/model/tiny.py)",
        has=(
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "rope_parameters",
            "vocab_size",
            "tie_word_embeddings",
        ),
    ),
    Row(
        "vllm:LLM",
        "log-probs from vLLM (rlmath/validation/vllm_log_probs.py)",
        has=("generate", "llm_engine"),
    ),
]


@parametrized(ROWS)
def test_ray_and_transformers(row):
    check(row)
