"""verl's settings (0.9, trainer/config) and their counterparts."""

from __future__ import annotations

from rlmath.commands.importing import verl_conversions as to
from rlmath.commands.importing.fact import (
    Fact,
    Framework,
    elsewhere,
    every,
    nodes_settings,
    trackers,
    when,
)
from rlmath.commands.importing.verl_conversions import ACTOR, OVERLONG, ROOT

# Without an effect on what is learned: kernels, sharding, memory, logs.
_NO_EFFECT = """
actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.use_shm
actor_rollout_ref.model.trust_remote_code actor_rollout_ref.model.use_fused_kernels
actor_rollout_ref.model.fused_kernel_options.* actor_rollout_ref.hybrid_engine
actor_rollout_ref.rollout.log_prob_* actor_rollout_ref.ref.* critic.ppo_m* critic.forward_*
critic.megatron.* critic.fsdp* critic.ulysses* critic.use_dynamic_bsz critic.strategy
actor_rollout_ref.actor.veomni.* actor_rollout_ref.rollout.enable_rollout_routing_replay
actor_rollout_ref.rollout.expert_parallel_size critic.model.use_remove_padding
critic.model.enable_gradient_checkpointing critic.enable
actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.use_torch_compile
actor_rollout_ref.actor.entropy_* actor_rollout_ref.actor.checkpoint.*
actor_rollout_ref.actor.calculate_* actor_rollout_ref.actor.fsdp_config.*
actor_rollout_ref.actor.megatron.use_* actor_rollout_ref.actor.megatron.grad_offload
actor_rollout_ref.actor.megatron.vanilla_mbridge actor_rollout_ref.actor.megatron.dist_*
actor_rollout_ref.actor.megatron.override_transformer_config.*
actor_rollout_ref.actor.megatron.override_ddp_config.*
actor_rollout_ref.actor.optim.override_optimizer_config.*
actor_rollout_ref.actor.use_fused_kernels actor_rollout_ref.actor.data_loader_seed
actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.free_cache_engine
actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.load_format
actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.engine_kwargs.*
actor_rollout_ref.rollout.disable_* actor_rollout_ref.rollout.calculate_log_probs
actor_rollout_ref.rollout.checkpoint_engine.* actor_rollout_ref.rollout.dtype
actor_rollout_ref.rollout.layered_summon actor_rollout_ref.rollout.prompt_length
actor_rollout_ref.rollout.response_length actor_rollout_ref.rollout.do_sample
actor_rollout_ref.rollout.agent.num_workers actor_rollout_ref.rollout.val_kwargs.do_sample
actor_rollout_ref.rollout.val_kwargs.top_k actor_rollout_ref.rollout.trace.*
actor_rollout_ref.rollout.skip_tokenizer_init actor_rollout_ref.rollout.cudagraph*
actor_rollout_ref.rollout.update_weights_bucket_megabytes actor_rollout_ref.rollout.update_*
data.filter_overlong_prompts_workers data.return_* data.image_key data.trust_remote_code
data.val_batch_size data.dataloader_num_workers data.tokenizer data.validation_shuffle
reward.num_workers reward.reward_kwargs.* reward_model.reward_kwargs.*
reward_model.launch_reward_fn_async reward_model.use_reward_loop
reward.reward_manager.source trainer.balance_batch trainer.experiment_name
trainer.log_val_generations trainer.val_before_train trainer.rollout_data_dir
trainer.validation_data_dir trainer.default_hdfs_dir trainer.del_local_ckpt_after_load
trainer.use_legacy_worker_impl trainer.device trainer.max_critic_ckpt_to_keep
trainer.ray_wait_register_center_timeout trainer.use_v1 trainer.max_samples ray_kwargs.*
global_profiler.* transfer_queue.* hydra.* actor_rollout_ref.nccl_timeout
actor_rollout_ref.model.override_config.*
"""

FACTS = (
    Fact(ROOT + "model.path", "model.path"),
    Fact("data.train_files", "data.train_paths",
         convert=to.paths("data.train_paths", "data.train_files")),
    Fact("data.val_files", "data.eval_paths",
         convert=to.paths("data.eval_paths", "data.val_files")),
    Fact("data.prompt_key", "data.prompt_key", "prompt"),
    Fact("data.reward_fn_key", "", "data_source",
         note="a verl reward gets the column data_source; rename yours"),
    Fact("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Fact("data.max_response_length", "rollout.max_response_tokens", 512),
    Fact("data.filter_overlong_prompts", "data.overlong_prompts", False, convert=to.prompts),
    Fact("data.truncation", "data.overlong_prompts", "error", convert=to.prompts,
         note=when("prompts are not cut here; longer ones are left out",
                   lambda given: given["data.truncation"] != "error")),
    Fact("data.shuffle", "data.shuffle", True),
    Fact("data.seed", "data.seed"),
    Fact("data.train_max_samples", "", -1, note="give a smaller file"),
    Fact("data.val_max_samples", "data.max_eval_problems", -1,
         convert=lambda given: {} if given.whole("data.val_max_samples") < 1
         else {"data.max_eval_problems": given.whole("data.val_max_samples")}),
    Fact("data.train_batch_size", "algorithm.prompts_per_step", 1024),
    Fact("data.gen_batch_size", "algorithm.filter.oversample", None, convert=to.group_filter),
    Fact("data.custom_cls.path", "", note="write the rows to a file, or see docs/extending.md"),
    Fact(ROOT + "rollout.n", "algorithm.group_size", 1),
    Fact(ACTOR + "ppo_mini_batch_size", "algorithm.minibatches_per_step", 256,
         convert=lambda given: {"algorithm.minibatches_per_step": to.minibatches(given)},
         note=when("counted in prompts by verl: train_batch_size / ppo_mini_batch_size optimizer "
                   "steps", lambda given: to.minibatches(given) > 1)),
    Fact(ACTOR + "ppo_epochs", "", 1, note="each sample is used once; use more minibatches"),
    Fact(ACTOR + "shuffle", "", False,
         note="minibatches are whole groups in the order of sampling"),
    Fact("algorithm.adv_estimator", "algorithm.advantage", "gae", convert=to.advantage,
         note=to.no_advantage),
    Fact("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", True, convert=to.advantage,
         note="False is dr_grpo"),
    Fact("algorithm.gamma", "value.gamma", 1.0, convert=elsewhere),
    Fact("algorithm.lam", "value.lam", 1.0, convert=elsewhere),
    Fact(ACTOR + "policy_loss.loss_mode", "algorithm.loss", "vanilla", convert=to.policy_loss,
         note=to.no_loss),
    Fact(ACTOR + "clip_ratio", "algorithm.loss_options.clip_low", 0.2, convert=to.policy_loss,
         note=when("without effect beside clip_ratio_low and clip_ratio_high, which are 0.2",
                   lambda given: given[ACTOR + "clip_ratio"] != 0.2
                   and ACTOR + "clip_ratio_low" not in given)),
    Fact(ACTOR + "clip_ratio_low", "algorithm.loss_options.clip_low", 0.2, convert=to.policy_loss),
    Fact(ACTOR + "clip_ratio_high", "algorithm.loss_options.clip_high", 0.2,
         convert=to.policy_loss),
    Fact(ACTOR + "clip_ratio_c", "algorithm.loss_options.dual_clip", 3.0, convert=to.policy_loss),
    Fact(f"{ACTOR}tau_pos {ACTOR}policy_loss.tau_pos", "algorithm.loss_options.tau_positive", 1.0,
         convert=to.policy_loss),
    Fact(f"{ACTOR}tau_neg {ACTOR}policy_loss.tau_neg", "algorithm.loss_options.tau_negative", 1.05,
         convert=to.policy_loss),
    Fact(ACTOR + "loss_agg_mode", "algorithm.aggregation", "token-mean", convert=to.aggregation,
         note=to.no_aggregation),
    Fact(ACTOR + "loss_scale_factor", "algorithm.aggregation_constant_tokens",
         convert=to.aggregation),
    Fact(ACTOR + "use_kl_loss", "algorithm.kl_coef", False, convert=to.kl_penalty,
         note=to.kl_place),
    Fact(ACTOR + "kl_loss_coef", "algorithm.kl_coef", 0.001, convert=to.kl_penalty),
    Fact(ACTOR + "kl_loss_type", "algorithm.kl_estimator", "low_var_kl", convert=to.kl_penalty),
    Fact("algorithm.use_kl_in_reward", "algorithm.kl_in", False, convert=to.kl_penalty),
    Fact("algorithm.kl_penalty", "algorithm.kl_estimator", "kl", convert=to.kl_penalty,
         note=when("only k1 may be in the reward",
                   lambda given: given.true("algorithm.use_kl_in_reward")
                   and given["algorithm.kl_penalty"] not in ("kl", "k1"))),
    Fact("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", 0.001, convert=to.kl_penalty),
    Fact("algorithm.kl_ctrl.type", "algorithm.kl_target", "fixed", convert=to.kl_penalty),
    Fact("algorithm.kl_ctrl.target_kl", "algorithm.kl_target", 0.1, convert=to.kl_penalty),
    Fact("algorithm.kl_ctrl.horizon", "algorithm.kl_horizon_samples", 10000, convert=to.kl_penalty),
    Fact(ACTOR + "entropy_coeff", "algorithm.entropy_coef", 0),
    Fact("algorithm.filter_groups.enable", "algorithm.filter.keep", False, convert=to.group_filter),
    Fact("algorithm.filter_groups.metric", "algorithm.filter.keep", convert=to.group_filter,
         note="acc is accuracy, others are variance"),
    Fact("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter.max_rounds", 0,
         convert=to.group_filter, note=when("0, no limit, is 100 rounds here",
                   lambda given: given.true("algorithm.filter_groups.enable")
                   and not given.whole("algorithm.filter_groups.max_num_gen_batches"))),
    Fact("algorithm.rollout_correction.rollout_is algorithm.rollout_is_level",
         "algorithm.correction.kind", convert=to.correction,
         note="token is token_truncate, sequence is seq_truncate; with two bounds token_mask and "
         "seq_mask_sum"),
    Fact("algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_is_threshold",
         "algorithm.correction.high", 2.0, convert=to.correction),
    Fact("algorithm.rollout_correction.rollout_rs", "",
         note="of verl's rejections there are seq_mask_geometric and seq_mask_sum, as "
         "algorithm.correction.kind"),
    Fact("algorithm.rollout_correction.*", "", note="set algorithm.correction by hand"),
    Fact("algorithm.use_pf_ppo algorithm.pf_ppo.*", "", False, note="use algorithm.filter"),
    Fact(ACTOR + "optim.lr", "actor.optimizer.lr", 1e-6),
    Fact(ACTOR + "optim.lr_warmup_steps", "actor.optimizer.warmup_steps", -1, convert=to.warmup,
         note=to.warmup_note),
    Fact(ACTOR + "optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps", 0.0,
         convert=to.warmup),
    Fact(f"{ACTOR}optim.lr_decay_style {ACTOR}optim.lr_scheduler_type {ACTOR}optim.warmup_style",
         "actor.optimizer.schedule", "constant",
         convert=lambda given: {"actor.optimizer.schedule": to.schedule(given)}),
    Fact(ACTOR + "optim.min_lr", "actor.optimizer.min_lr", 0.0, convert=to.min_lr),
    Fact(ACTOR + "optim.min_lr_ratio", "actor.optimizer.min_lr", 0.0, convert=to.min_lr,
         note="a share of the learning rate"),
    Fact(ACTOR + "optim.lr_decay_steps", "actor.optimizer.decay_steps", None,
         convert=lambda given: {} if not given[ACTOR + "optim.lr_decay_steps"] else {
             "actor.optimizer.decay_steps":
             given.whole(ACTOR + "optim.lr_decay_steps") * to.minibatches(given)}),
    Fact(ACTOR + "optim.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Fact(ACTOR + "optim.betas", "actor.optimizer.adam_beta1 actor.optimizer.adam_beta2",
         [0.9, 0.999], convert=lambda given: {
             "actor.optimizer.adam_beta1": given[ACTOR + "optim.betas"][0],
             "actor.optimizer.adam_beta2": given[ACTOR + "optim.betas"][1]}),
    Fact(f"{ACTOR}optim.clip_grad {ACTOR}grad_clip", "actor.optimizer.clip_grad_norm", 1.0),
    Fact(ACTOR + "optim.optimizer", "", None, note="Adam with decoupled weight decay (AdamW)",
         harmless=True),
    Fact(ACTOR + "optim.*", "", note="see actor.optimizer"),
    Fact("critic.optim.lr", "value.optimizer.lr", 1e-5, convert=elsewhere),
    Fact("critic.optim.weight_decay", "value.optimizer.weight_decay", 0.01,
         convert=elsewhere),
    Fact("critic.optim.*", "", note="see value.optimizer"),
    Fact("critic.cliprange_value", "value.clip", 0.5, convert=elsewhere),
    Fact("trainer.critic_warmup", "value.warmup_steps", 0, convert=elsewhere),
    Fact("critic.model.path", "", None,
         note="the value model begins as the policy's model, model.path"),
    Fact("critic.model.*", "", note="the value model is laid out as the actor"),
    Fact("model_engine", "", "dp", harmless=True, note="Megatron always trains"),
    Fact(ACTOR + "strategy", "", "fsdp", harmless=True,
         note="Megatron always trains; rlmath plan layout proposes a layout"),
    Fact(ACTOR + "use_dynamic_bsz", "actor.max_tokens_per_microbatch", False, convert=to.tokens),
    Fact(ACTOR + "ppo_max_token_len_per_gpu", "actor.max_tokens_per_microbatch", 16384,
         convert=to.tokens),
    Fact(ACTOR + "ppo_micro_batch_size_per_gpu", "actor.max_tokens_per_microbatch",
         convert=to.tokens),
    Fact(ACTOR + "megatron.tensor_model_parallel_size", "actor.tensor_parallel", 1,
         convert=to.tensor_parallel),
    Fact(ACTOR + "megatron.sequence_parallel", "actor.sequence_parallel", True,
         convert=to.tensor_parallel),
    Fact(ACTOR + "megatron.pipeline_model_parallel_size", "actor.pipeline_parallel", 1),
    Fact(ACTOR + "megatron.virtual_pipeline_model_parallel_size", "actor.virtual_stages"),
    Fact(ACTOR + "megatron.context_parallel_size", "actor.context_parallel", 1, convert=to.tokens),
    Fact(f"{ACTOR}ulysses_sequence_parallel_size {ACTOR}fsdp_config.ulysses_sequence_parallel_size",
         "actor.context_parallel", 1, convert=to.tokens),
    Fact(ACTOR + "megatron.expert_model_parallel_size", "actor.expert_parallel", 1),
    Fact(ACTOR + "megatron.expert_tensor_parallel_size", "", None, harmless=True,
         note="expert_parallel=1 splits experts over tensor-parallel ranks, more leaves them "
         "whole"),
    Fact(ACTOR + "megatron.param_offload", "actor.offload", False, convert=to.offload),
    Fact(ACTOR + "megatron.optimizer_offload", "actor.offload", False, convert=to.offload),
    Fact(ACTOR + "fsdp_config.param_offload", "actor.offload", False, convert=to.offload),
    Fact(ACTOR + "fsdp_config.optimizer_offload", "actor.offload", False, convert=to.offload),
    Fact(ROOT + "model.enable_gradient_checkpointing", "actor.recompute", True,
         convert=to.recompute),
    Fact(ACTOR + "megatron.override_transformer_config.recompute_granularity", "actor.recompute",
         convert=to.recompute),
    Fact(ACTOR + "megatron.override_transformer_config.recompute_method", "actor.recompute",
         convert=elsewhere),
    Fact(ACTOR + "megatron.override_transformer_config.recompute_num_layers",
         "actor.recompute_num_layers", convert=to.recompute),
    Fact(f"{ACTOR}router_replay.mode {ACTOR}megatron.router_replay.mode", "actor.routing_replay",
         "disabled", {"disabled": None, "R2": "old_log_probs", "R3": "engine"}),
    Fact(f"{ROOT}model.lora_rank {ROOT}model.lora.rank", "actor.lora.rank", 0, convert=to.lora),
    Fact(f"{ROOT}model.lora_alpha {ROOT}model.lora.alpha", "actor.lora.alpha", 16, convert=to.lora),
    Fact(f"{ROOT}model.target_modules {ROOT}model.lora.target_modules", "actor.lora.targets",
         "all-linear", convert=to.lora),
    Fact(ROOT + "model.lora*", "", note="see actor.lora"),
    Fact(ROOT + "rollout.name", "", "vllm", note="vLLM always samples"),
    Fact(ROOT + "rollout.temperature", "rollout.temperature", 1.0),
    Fact(ROOT + "rollout.top_p", "", 1, note="training samples from the full distribution here"),
    Fact(ROOT + "rollout.top_k", "", -1, note="training samples from the full distribution here"),
    Fact(ROOT + "rollout.tensor_model_parallel_size", "rollout.tensor_parallel", 2),
    Fact(ROOT + "rollout.data_parallel_size", "", 1, harmless=True),
    Fact(ROOT + "rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization", 0.5),
    Fact(ROOT + "rollout.enforce_eager", "rollout.enforce_eager", False),
    Fact(ROOT + "rollout.max_num_batched_tokens", "rollout.max_batched_tokens", 8192),
    Fact(ROOT + "rollout.max_num_seqs", "rollout.max_running_sequences", 256),
    Fact(ROOT + "rollout.enable_prefix_caching", "rollout.prefix_caching", True),
    Fact(ROOT + "rollout.ignore_eos", "rollout.ignore_eos", False),
    Fact(ROOT + "rollout.quantization", "rollout.quantization", None, {"None": None, "fp8": "fp8"}),
    Fact(ROOT + "rollout.multi_turn.*", "", note="see rollout.tools (docs/tools.md)"),
    Fact(ROOT + "rollout.val_kwargs.temperature", "eval.temperature", 0),
    Fact(ROOT + "rollout.val_kwargs.top_p", "eval.top_p", 1.0),
    Fact(ROOT + "rollout.val_kwargs.n", "eval.samples", 1),
    Fact("reward.custom_reward_function.path custom_reward_function.path", "reward.items",
         convert=to.rewards, note=to.reward_note),
    Fact("reward.custom_reward_function.name custom_reward_function.name", "reward.items",
         "compute_score", convert=to.rewards),
    Fact("custom_reward_function.* reward.custom_reward_function.*", "",
         note="give them as params of the reward item"),
    Fact("reward.reward_manager.name reward_model.reward_manager reward_manager.name",
         "reward.items", "naive", {"naive": None, "dapo": None, "batch": None, "prime": None},
         note="one manager calls all rewards here; dapo scores right 1 and wrong -1"),
    Fact(f"{OVERLONG}enable reward_model.overlong_buffer.enable "
         "reward_model.reward_kwargs.overlong_buffer_cfg.enable", "reward.items", False,
         convert=to.rewards, note="the reward soft_overlong_punishment"),
    Fact(f"{OVERLONG}len reward_model.overlong_buffer.len "
         "reward_model.reward_kwargs.overlong_buffer_cfg.len", "reward.items", 0,
         convert=elsewhere),
    Fact(f"{OVERLONG}penalty_factor reward_model.overlong_buffer.penalty_factor "
         "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "reward.items", 1.0,
         convert=elsewhere),
    Fact(f"{OVERLONG}log reward_model.overlong_buffer.log", "", False, harmless=True),
    Fact("reward.reward_model.enable reward_model.enable", "", False,
         note="a reward model is a reward of yours that asks its server (docs/rewards.md)"),
    Fact("reward.reward_model.* reward_model.*", "", note="see docs/rewards.md"),
    Fact("reward.sandbox_fusion.* sandbox_fusion.*", "", note="see the sandboxes of "
         "docs/rewards.md"),
    Fact("trainer.nnodes", "cluster.nodes", 1,
         convert=lambda given: nodes_settings(given.whole("trainer.nnodes"))),
    Fact("trainer.n_gpus_per_node", "cluster.gpus_per_node", 8),
    Fact("trainer.total_training_steps", "runner.steps", convert=to.steps),
    Fact("trainer.total_epochs", "runner.steps", 30, convert=to.steps, note=to.steps_note),
    Fact("trainer.save_freq", "runner.save_every", -1,
         convert=every("runner.save_every", "trainer.save_freq")),
    Fact("trainer.max_actor_ckpt_to_keep", "runner.keep_checkpoints"),
    Fact("trainer.test_freq", "eval.every", -1,
         convert=every("eval.every", "trainer.test_freq")),
    Fact("trainer.default_local_dir", "runner.run_dir", convert=to.folder),
    Fact("trainer.resume_mode", "runner.resume", "auto", convert=to.resume),
    Fact("trainer.resume_from_path", "runner.resume", convert=to.resume),
    Fact("trainer.logger", "runner.trackers", ["console", "wandb"],
         convert=trackers("trainer.logger"), note="the console and metrics.jsonl are always there"),
    Fact("trainer.project_name", "runner.tracker_project", "verl_examples"),
    Fact("distillation.*", "", note="see teacher and algorithm.distill_coef (docs/algorithms.md)"),
    Fact(_NO_EFFECT, "", harmless=True),
)  # fmt: skip

VERL = Framework(
    "verl",
    "0.9",
    FACTS,
    always=(
        "a group's standard deviation: both divide by n - 1 and add 1e-6; a group of one sample "
        "keeps its reward as its advantage in verl, and has 0 here",
        "the policy's denominators are those of the whole optimizer minibatch in both",
        "verl's answers stand in reward_model.ground_truth, which is data.answer_key",
    ),
    base={
        "data.answer_key": "reward_model.ground_truth",
        "data.apply_chat_template": True,
        "data.prompt_template": "{prompt}",
        "algorithm.early_stop_ratio": None,
        "actor.optimizer.adam_eps": 1e-8,
        "cluster.device": "cuda",
    },
    run_length=lambda given, rows: {
        "trainer.total_training_steps": given["trainer.total_training_steps"]
        or int(
            given.number("trainer.total_epochs") * (rows // given.whole("data.train_batch_size"))
        )
    },
)
