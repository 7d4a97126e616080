"""What CPU engines rely on in vLLM: the scheduler, sampling, norms and the way weights are packed.

Patched or private, so a new version of vLLM changes it without a word.
"""

import pytest

from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
DECODES = "decode steps on CPU (rlmath/vllm_plugin/cpu_scheduler.py)"
ROUNDS = "several decode steps at once on CPU (rlmath/vllm_plugin/cpu_rounds.py)"
SAMPLING = "sampling on CPU (rlmath/vllm_plugin/cpu_sampling.py)"
ROUTES = "routes of an MoE from CPU engines (rlmath/vllm_plugin/cpu_routes.py)"
LOADING = "weight sync into CPU engines (rlmath/weights/transports/cpu_load.py)"
PARTS = "where an engine keeps a tensor (rlmath/weights/transports/engine_parts.py)"
PACKED = "reading back packed matrices (rlmath/weights/transports/packed.py)"
PRINTS = "fingerprints of an engine (rlmath/weights/transports/engine_fingerprints.py)"
LAYERWISE = "weight sync of an MoE (rlmath/weights/transports/shared_memory_engine.py)"
PRECISION = "the precision contract with the engine (rlmath/vllm_plugin/engine_precision.py)"

ROWS = [
    # -- the scheduler -------------------------------------------------------------------------
    Row(
        SCHEDULER,
        has=(
            "running",
            "waiting",
            "requests",
            "kv_cache_config",
            "num_spec_tokens",
            "connector",
            "ec_connector",
            "aux_output_connector",
            "lora_config",
            "use_pp",
            "use_v2_model_runner",
            "log_stats",
            "perf_metrics",
            "return_sampling_mask",
            "enable_kv_cache_events",
            "scheduler_config",
            "dcp_world_size",
            "pcp_world_size",
            "max_num_active_reqs",
            "kv_holding_waiting",
            "_pause_state",
            "max_num_scheduled_tokens",
            "block_size",
            "prev_step_scheduled_req_ids",
            "finished_req_ids",
            "reset_preempted_req_ids",
            "current_step",
            "max_model_len",
            "vllm_config",
        ),
        breaks=f"{DECODES} read and write the scheduler's own state",
    ),
    Row(f"{SCHEDULER}.schedule", f"{DECODES} stand in for it", passes=("throttle_prefills",)),
    Row(
        f"{SCHEDULER}.update_from_output",
        f"{DECODES} stand in for it",
        passes=("scheduler_output", "model_runner_output"),
    ),
    Row(f"{SCHEDULER}.add_request", f"{DECODES} stand in for it", passes=("request",)),
    Row("vllm.v1.core.sched.interface:PauseState.UNPAUSED", f"{DECODES} run while paused"),
    Row(
        "vllm.v1.core.sched.output:SchedulerOutput",
        f"{DECODES} build it; a new field would stay at its default",
        all_fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "scheduled_encoder_inputs",
            "finished_req_ids",
            "free_encoder_mm_hashes",
            "scheduled_encoder_input_stats",
            "preempted_req_ids",
            "has_structured_output_requests",
            "pending_structured_output_tokens",
            "num_invalid_spec_tokens",
            "kv_connector_metadata",
            "has_sync_kv_loads",
            "aux_output_connector_metadata",
            "ec_connector_metadata",
            "ec_manager_metadata",
            "kv_cache_block_copies",
            "kv_connector_block_state",
            "new_block_ids_to_zero",
            "num_common_prefix_blocks",
            "num_spec_tokens_to_schedule",
        ),
    ),
    Row(
        "vllm.v1.core.sched.output:CachedRequestData",
        f"{DECODES} build it; a new field would stay at its default",
        all_fields=(
            "req_ids",
            "resumed_req_ids",
            "new_token_ids",
            "all_token_ids",
            "new_block_ids",
            "num_computed_tokens",
            "num_output_tokens",
        ),
    ),
    Row(
        "vllm.v1.engine:EngineCoreOutput",
        f"{DECODES} build it",
        fields=("request_id", "new_token_ids", "new_logprobs", "trace_headers", "finish_reason"),
    ),
    Row("vllm.v1.engine:EngineCoreOutputs", f"{DECODES} build it", fields=("outputs",)),
    Row("vllm.v1.outputs:LogprobsLists", f"{DECODES} cut log-probs", has=("slice_request",)),
    Row(
        "vllm.v1.outputs:LogprobsLists.slice_request",
        f"{DECODES} take one position of a request",
        passes=("req_idx", "num_positions"),
    ),
    Row(
        "vllm.v1.request:Request",
        f"{DECODES} and the ends of sequences",
        has=(
            "num_computed_tokens",
            "num_in_flight_tokens",
            "_all_token_ids",
            "_output_token_ids",
            "request_id",
            "client_index",
            "trace_headers",
            "max_tokens",
            "sampling_params",
            "use_structured_output",
            "has_encoder_inputs",
            "resumable",
            "lora_request",
            "is_finished",
            "append_output_token_ids",
        ),
    ),
    Row(
        "vllm.sampling_params:SamplingParams",
        f"{DECODES}: requests that ask for more than tokens go vLLM's way",
        has=(
            "eos_token_id",
            "stop_token_ids",
            "prompt_logprobs",
            "repetition_detection",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
            "bad_words",
            "logit_bias",
            "allowed_token_ids",
        ),
    ),
    Row(
        "vllm.config:ModelConfig",
        f"{ROUNDS}: models that take more than tokens and positions go vLLM's way",
        has=("is_multimodal_model", "uses_mrope", "is_encoder_decoder", "enable_prompt_embeds"),
    ),
    Row(
        "vllm.v1.outputs:ModelRunnerOutput",
        f"{DECODES}: an output with anything else in it goes vLLM's way, so all fields are known",
        all_fields=(
            "req_ids",
            "req_id_to_index",
            "sampled_token_ids",
            "logprobs",
            "prompt_logprobs_dict",
            "prompt_token_id_logprobs_dict",
            "pooler_output",
            "kv_connector_output",
            "ec_connector_output",
            "num_nans_in_logits",
            "cudagraph_stats",
            "aux_output_connector_output",
            "sampling_masks",
        ),
    ),
    Row("vllm.v1.kv_cache_interface:FullAttentionSpec", f"{DECODES}: other caches go vLLM's way"),
    # -- rounds of decode steps ----------------------------------------------------------------
    Row(
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState",
        f"{ROUNDS} begin at the logits of a step",
        has=("scheduler_output", "logits", "slot_mappings"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        f"{ROUNDS} stand in for it",
        passes=("grammar_output",),
        says=(
            "sampler_output = self._sample(logits, spec_decode_metadata)",
            "self.execute_model_state = None",
        ),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        f"{ROUNDS} write the next step's inputs where vLLM does",
        has=(
            "execute_model_state",
            "input_ids",
            "positions",
            "seq_lens",
            "optimistic_seq_lens_cpu",
            "input_batch",
            "requests",
            "model",
        ),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        f"{ROUNDS} call it for each step",
        takes=("num_tokens", "num_reqs", "max_query_len", "slot_mappings"),
        says=(
            "seq_lens=self.seq_lens[:num_reqs_padded]",
            "max_seq_len = self.optimistic_seq_lens_cpu.numpy()[:num_reqs].max().item()",
            "positions=self.positions[:num_tokens_padded]",
        ),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings",
        f"{ROUNDS}: a layer's slots are a view of the table",
        says=("slot_mapping = blk_table.slot_mapping.gpu[:num_tokens_padded]",),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
        f"{ROUNDS} call it for each step",
        takes=("input_ids", "positions"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        f"{ROUNDS} call it for each step",
        takes=("logits", "spec_decode_metadata"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        f"{ROUNDS} keep the books of several steps at once",
        says=(
            "self.input_batch.token_ids_cpu[req_idx, start_idx:end_idx] = sampled_ids",
            "self.input_batch.is_token_ids[req_idx, start_idx:end_idx] = True",
            "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
            "req_state.output_token_ids.extend(sampled_ids)",
        ),
    ),
    Row(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_tensors",
        f"{ROUNDS}: an array and its tensor are the same memory",
        says=("v.gpu = v.cpu",),
    ),
    Row(
        "vllm.forward_context:set_forward_context",
        f"{ROUNDS} call it for each step",
        takes=("attn_metadata", "vllm_config", "num_tokens", "slot_mapping"),
    ),
    Row(
        "vllm.v1.outputs:LogprobsLists.slice_request",
        f"{ROUNDS}: a request's positions are one after another",
        says=("req_idx = self.cu_num_generated_tokens[req_idx]",),
    ),
    # -- sampling and norms --------------------------------------------------------------------
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        f"{SAMPLING} stands in for it",
        passes=("logits", "generators", "k", "p"),
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
        f"{SAMPLING} reads how log-probs are meant",
        has=("use_fp64_gumbel", "logprobs_mode"),
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        f"{SAMPLING} calls it",
        passes=("logits", "k", "p"),
    ),
    Row(
        "vllm.v1.sample.sampler:Sampler.gather_logprobs",
        f"{SAMPLING} stands in for it",
        passes=("logprobs", "num_logprobs", "token_ids"),
    ),
    Row(
        "vllm.v1.outputs:LogprobsTensors",
        f"{SAMPLING} builds it by position; the engine reads column 0 as the sampled token",
        fields=("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ),
    Row(
        "vllm.platforms.interface:Platform", f"{SAMPLING}, norms", has=("import_kernels", "is_cpu")
    ),
    Row(
        "vllm.ir:ops",
        "RMSNorm on CPU (rlmath/vllm_plugin/cpu_norms.py)",
        has=("rms_norm", "fused_add_rms_norm"),
    ),
    # -- weights into CPU engines --------------------------------------------------------------
    Row(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        PARTS,
        has=("num_heads", "num_kv_heads", "num_kv_head_replicas", "head_size", "tp_rank"),
    ),
    Row(
        "vllm.model_executor.layers.linear:MergedColumnParallelLinear",
        PARTS,
        has=("output_partition_sizes", "tp_rank", "quant_method"),
    ),
    Row(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        PARTS,
        has=("input_size_per_partition", "tp_rank"),
    ),
    Row(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        PARTS,
        has=("shard_indices",),
    ),
    Row(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices",
        PARTS,
        has=("org_vocab_start_index", "num_org_elements"),
    ),
    Row(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        f"{LOADING} sets cpu_linear to None, so that vLLM packs the new matrix",
        says=("cpu_linear",),
    ),
    Row(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        f"{LOADING} has vLLM pack again",
        has=("process_weights_after_loading",),
    ),
    Row(
        "vllm.model_executor.layers.utils:check_cpu_sgl_kernel",
        f"{LOADING} asks which matrices are packed",
    ),
    # -- routes --------------------------------------------------------------------------------
    Row(
        "vllm.distributed.aux_output_connector.connector:AuxRequestOutput",
        f"{ROUTES}: the worker's half makes them",
        all_fields=("token_start", "rows"),
    ),
    Row(
        "vllm.distributed.aux_output_connector.connector:AuxOutputConnectorMetadata",
        f"{ROUTES}: the first row that each request wants",
        fields=("requests",),
    ),
    Row(
        f"{SCHEDULER}.update_from_output",
        f"{ROUTES}: the scheduler takes them from the runner's output",
        says=(
            "self.aux_output_connector.take_output(",
            "model_runner_output.aux_output_connector_output",
            "routed_experts=routed_experts",
        ),
    ),
    Row(
        f"{SCHEDULER}.schedule",
        f"{ROUTES}: the scheduler says from which token on",
        says=("scheduler_output.aux_output_connector_metadata = (",),
    ),
    Row(
        "vllm.v1.outputs:ModelRunnerOutput",
        f"{ROUTES} come in it",
        fields=("aux_output_connector_output",),
    ),
    Row(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.initialize_kv_cache",
        f"{ROUTES}: the model and the cache are there then",
        passes=("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        f"{ROUTES}: rows are taken after it",
        passes=("scheduler_output", "intermediate_tensors"),
        says=("self._prepare_inputs(scheduler_output, num_scheduled_tokens_np)", "return None"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        f"{ROUTES} are put into its output",
        says=("output = ModelRunnerOutput(", "if not self.use_async_scheduling:"),
    ),
    Row(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        f"{ROUTES}: which rows are whose",
        has=("input_batch", "query_start_loc", "kv_cache_config", "vllm_config"),
    ),
    Row(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        f"{ROUTES}: which rows are whose",
        has=("block_table", "num_computed_tokens_cpu", "num_reqs", "req_ids"),
    ),
    Row(
        "vllm.v1.worker.block_table:BlockTable",
        f"{ROUTES}: where a token is in the cache",
        has=("block_table", "slot_mapping", "block_size"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer",
        ROUTES,
        takes=("model", "capturer"),
        says=("module.router.set_capture_fn(capture_fn)", "capturer.capture, module.layer_id"),
    ),
    # -- reading back what is packed -----------------------------------------------------------
    Row(
        "vllm._custom_ops:cpu_prepack_moe_weight",
        f"{PACKED} packs positions as vLLM packs experts",
        takes=("weight", "isa"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        f"{PRINTS} reads the experts of this kernel",
        has=("isa",),
        says=("_use_zentorch", "replace_parameter", "new_w13[:, padded_size"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend",
        f"{PRINTS} knows the order of these kernels' experts",
        has=("CPU", "TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized:"
        "convert_to_unquantized_kernel_format",
        f"{PRINTS} swaps gate and up of FlashInfer CUTLASS alone",
        says=("swap_w13_to_w31",),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        f"{PRINTS} finds an expert and a worker's share of it",
        has=("expert_map",),
        says=("global_num_experts", "intermediate_size_per_partition"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",
        "weights/transports/engine_parts.py says which slice of an expert a worker reads",
        fields=("moe_parallel_config", "tp_shard_with_padding"),
    ),
    # -- vLLM's layerwise reload ---------------------------------------------------------------
    Row(
        "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
        f"{LAYERWISE} copies what a layer holds back",
        takes=("layer",),
    ),
    Row(
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        f"{LAYERWISE} copies what a layer holds back",
        fields=("loaded_weights",),
    ),
    Row(
        "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
        LAYERWISE,
        takes=("model",),
    ),
    Row(
        "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
        LAYERWISE,
        takes=("model", "model_config"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{LAYERWISE}: without a kernel it packs the experts again",
        has=("moe_kernel", "process_weights_after_loading"),
    ),
    # -- precision -----------------------------------------------------------------------------
    Row(
        "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear",
        f"{PRECISION}: a router in float32",
        takes=("out_dtype", "force_fp32_compute"),
        has=("out_dtype",),
    ),
    Row(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        f"{PRECISION}: which type the output layer multiplies in",
        has=("head_dtype",),
    ),
    Row("vllm.model_executor.custom_op:PluggableLayer.register_oot", PRECISION, takes=("name",)),
    Row("vllm.model_executor.custom_op:op_registry_oot", PRECISION),
    Row("vllm.config:ModelConfig", PRECISION, has=("logprobs_mode", "dtype", "head_dtype")),
]


@parametrized(ROWS)
def test_vllm_on_cpu(row):
    check(row)
