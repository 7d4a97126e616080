"""What the code replaces in Megatron and torch on a CPU, and how it calls Megatron's schedule."""

import pytest

from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
SHIM = "Megatron on a CPU (rlmath/device/cpu_shim.py)"
SCHEDULE = "micro-batches and their loss (rlmath/actor/schedule.py)"
OPTIMIZER = "the optimizer (rlmath/actor/optimizer.py)"
GROUPS = "process groups (rlmath/actor/parallel.py)"
MOE = "Qwen3-MoE on a CPU (rlmath/device/cpu_shim.py, rlmath/actor/experts.py)"
OF_SCHEDULES = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "forward_only",
)

ROWS = [
    # -- what the shim replaces: our functions get what Megatron passes ------------------------
    Row(
        "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl",
        f"{SHIM}: swiglu stands in for it",
        passes=("input", "bias", "fp8_input_store", "cpu_offload_input"),
    ),
    Row(
        "megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl",
        f"{SHIM}: weighted_swiglu stands in for it",
        passes=("input", "bias", "weights", "fp8_input_store"),
    ),
    Row(
        "megatron.core.transformer.mlp",
        f"{SHIM} replaces the names that MLP.forward looks up in this module",
        has=("bias_swiglu_impl", "weighted_bias_swiglu_impl"),
        says=("= bias_swiglu_impl(", "= weighted_bias_swiglu_impl("),
    ),
    Row(
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        f"{SHIM}: PackedRotary stands in for it",
        passes=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
    ),
    Row(
        "megatron.core.transformer.attention",
        f"{SHIM} replaces the name that attention looks up in this module",
        has=("apply_rotary_pos_emb",),
        says=("query = apply_rotary_pos_emb(", "key = apply_rotary_pos_emb("),
    ),
    Row(
        "megatron.core.tensor_parallel.mappings:all_to_all",
        f"{MOE}: counts of tokens become lists, which torch takes on a CPU",
        passes=("group", "input_", "output_split_sizes_", "input_split_sizes"),
    ),
    Row("megatron.core.transformer.moe.token_dispatcher", MOE, has=("all_to_all",)),
    Row(
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        "a dispatcher keeps its last micro-batch (rlmath/actor/experts.py, release_routing)",
        has=("probs", "routing_map"),
        says=("self.probs = probs", "self.routing_map = routing_map"),
    ),
    Row(
        "megatron.core.transformer.moe.moe_layer:MoELayer",
        "a dispatcher keeps its last micro-batch (rlmath/actor/experts.py, release_routing)",
        has=("token_dispatcher",),
    ),
    Row(
        "megatron.core.tensor_parallel.random",
        f"{SHIM}: the CPU's generator takes the place of CUDA's",
        has=("_get_cuda_rng_state", "_set_cuda_rng_state", "CudaRNGStatesTracker"),
        says=("_get_cuda_rng_state(", "_set_cuda_rng_state("),
    ),
    Row(
        "torch.utils._device:_device_constructors",
        f"{SHIM} has to make this list before it replaces torch's factories",
        says=("@functools.lru_cache", "torch.empty"),
    ),
    Row(
        "torch.distributed:ProcessGroupGloo",
        "gloo groups share a device (rlmath/device/gloo.py)",
        has=("_Options", "create_device", "create_default_device"),
    ),
    # -- the schedule --------------------------------------------------------------------------
    Row(
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        SCHEDULE,
        takes=OF_SCHEDULES,
    ),
    Row(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        SCHEDULE,
        takes=OF_SCHEDULES,
    ),
    Row(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        f"{SCHEDULE}: a loss of three values is left as it is; one of two would be divided by the "
        "number of micro-batches",
        says=(
            "if len(outputs) == 3:",
            "if not config.calculate_per_token_loss:",
            "output_tensor /= num_microbatches",
        ),
    ),
    # -- optimizer and groups ------------------------------------------------------------------
    Row(
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        f"{OPTIMIZER}: without a count of tokens gradients are summed and divided by nothing",
        takes=("model", "num_tokens"),
        says=("if num_tokens is not None:",),
    ),
    Row(
        "megatron.core.optimizer.optimizer_config:OptimizerConfig",
        OPTIMIZER,
        fields=(
            "optimizer",
            "lr",
            "min_lr",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "clip_grad",
            "bf16",
            "params_dtype",
            "use_distributed_optimizer",
        ),
    ),
    Row(
        "megatron.core.optimizer:get_standard_config_overrides",
        f"{OPTIMIZER}: weight decay on matrices only",
        takes=("config",),
    ),
    Row(
        "megatron.core.optimizer.optimizer:MegatronOptimizer",
        f"{OPTIMIZER}: an update",
        has=("prepare_grads", "get_grad_norm", "step", "zero_grad", "param_groups", "scale_loss"),
    ),
    Row(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler",
        OPTIMIZER,
        takes=(
            "init_lr",
            "max_lr",
            "min_lr",
            "lr_warmup_steps",
            "lr_decay_steps",
            "lr_decay_style",
            "start_wd",
            "end_wd",
            "wd_incr_steps",
            "wd_incr_style",
        ),
        has=("num_steps", "step", "state_dict"),
    ),
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        f"{OPTIMIZER}: gradients of a minibatch",
        has=("no_sync", "zero_grad_buffer"),
    ),
    Row(
        "megatron.core.parallel_state:initialize_model_parallel",
        GROUPS,
        takes=(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "create_gloo_process_groups",
            "distributed_timeout_minutes",
        ),
    ),
    Row(
        "megatron.core.parallel_state:initialize_model_parallel",
        f"{GROUPS}: neighbors share a layer, stages are the farthest apart; placement, "
        "weight sync and dry runs count on it",
        says=('order: str = "tp-cp-ep-dp-pp"',),
    ),
]


@parametrized(ROWS)
def test_megatron_on_cpu(row):
    check(row)
