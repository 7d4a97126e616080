"""OpenRLHF's command line (0.11, ``openrlhf.cli.train_ppo_ray``) and its counterparts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlmath.commands.importing.fact import (
    EPOCHS,
    Fact,
    Framework,
    Given,
    Settings,
    data_paths,
    elsewhere,
    every,
    kl_in_reward,
    lora_settings,
    nodes_settings,
    overlong_reward,
    when,
)

_ADVANTAGES = {
    "gae": "gae",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
_INWARDS = 1e-6
_CORRECTIONS = {"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": "seq_mask_sum"}


def _minibatches(given: Given) -> int:
    samples = given.whole("rollout.batch_size") * given.whole("rollout.n_samples_per_prompt")
    return max(1, samples // given.whole("train.batch_size"))


def _clip(given: Given) -> Settings:
    both = given["actor.eps_clip_low_high"]
    low, high = both if isinstance(both, list) else (given["actor.eps_clip"],) * 2
    loss = "gspo" if given["actor.policy_loss_type"] == "gspo" else "ppo_clip"
    options = {"clip_low": low, "clip_high": high, "dual_clip": given["actor.dual_clip"]}
    found: Settings = {"algorithm.loss": loss, "algorithm.loss_options": options}
    aggregation = "seq_mean_token_mean" if loss == "gspo" else "token_mean"
    return found | {"algorithm.aggregation": aggregation}


def _kl(given: Given) -> Settings:
    coef = given.number("algo.kl.init_coef")
    if not coef:
        return {"algorithm.kl_coef": 0.0}
    if given.true("algo.kl.use_loss"):
        return {"algorithm.kl_coef": coef, "algorithm.kl_estimator": given["algo.kl.estimator"]}
    return kl_in_reward(coef, given["algo.kl.target"], given["algo.kl.horizon"])


def _advantage(given: Given) -> Settings:
    name = _ADVANTAGES.get(str(given["algo.advantage.estimator"]), "grpo")
    found: Settings = {"algorithm.advantage": name}
    return found | ({"algorithm.advantage_options.epsilon": 1e-9} if name == "grpo" else {})


def _no_advantage(given: Given) -> str:
    name = str(given["algo.advantage.estimator"])
    return "" if name in _ADVANTAGES else f"{name} has no counterpart; grpo is set in its place"


_no_advantage.__doc__ = ", ".join(f"{k} is {v}" for k, v in _ADVANTAGES.items())


def _correction(given: Given) -> Settings:
    if not given.true("algo.advantage.is_correction_enable"):
        return {}
    kind = _CORRECTIONS.get(str(given["algo.advantage.is_correction_type"]), "token_truncate")
    low, high = given["algo.advantage.is_correction_threshold"]
    found: Settings = {"algorithm.correction.kind": kind, "algorithm.correction.high": high}
    return found if kind == "token_truncate" else found | {"algorithm.correction.low": low}


def _value(given: Given) -> Settings:
    if given["algo.advantage.estimator"] != "gae":
        return {}
    return {
        "value.gamma": given["algo.advantage.gamma"],
        "value.lam": given["algo.advantage.lambd"],
        "value.clip": given["critic.value_clip"],
        "value.optimizer.lr": given["critic.adam.lr"],
        "value.warmup_steps": max(0, given.whole("critic.freezing_steps")),
    }


def _rewards(given: Given) -> Settings:
    places = [one for one in str(given["reward.remote_url"] or "").split(",") if one]
    servers = [one for one in places if one.startswith("http")]
    items: list[dict[str, Any]] = [{"name": "math"}]
    if servers:  # Its protocol is the reward server's here, and several share the load in both.
        items = [{"name": "remote", "params": {"urls": servers}}]
    elif places and places[0].endswith(".py"):
        items = [{"name": f"{places[0]}:reward_func"}]
    if _truncated_part(given) < 0:
        items.append({"name": "stop_properly", "params": {"penalty": _truncated_part(given)}})
    if given["reward.overlong_buffer_len"]:
        buffer, factor = (
            given.number(f"reward.overlong_{one}") for one in ("buffer_len", "penalty_factor")
        )
        items.append(overlong_reward(_response_tokens(given), int(buffer), factor))
    return {"reward.items": items}


def _response_tokens(given: Given) -> int:
    return given.whole("rollout.max_new_tokens") if given["rollout.max_new_tokens"] else (
        given.whole("data.max_len") // 2
    )  # fmt: skip


def _is_colocated(given: Given) -> bool:
    """Whether engines share the actor's GPUs."""
    return given.true("train.colocate_all") and not given.true("train.async_enable")


def _gpus(given: Given) -> Settings:
    gpus = given.whole("actor.num_gpus_per_node")
    if _is_colocated(given) or given.whole("actor.num_nodes") > 1 or not given["vllm.num_engines"]:
        return {"cluster.gpus_per_node": gpus}
    engines = given.whole("vllm.num_engines") * given.whole("vllm.tensor_parallel_size")
    copies = gpus // (given.whole("ds.ring_attn_size") * given.whole("ds.tensor_parallel_size"))
    return {"cluster.gpus_per_node": gpus + engines, "actor.data_parallel": copies}


def _truncated_part(given: Given) -> float:
    """1 where truncated responses are as others."""
    coefficient = given["reward.stop_properly_penalty_coef"]
    return 1.0 if coefficient is None else float(coefficient)


def _paths(ours: str, theirs: str, split: str) -> Callable[[Given], Settings]:
    def convert(given: Given) -> Settings:
        names = [one for one in str(given[theirs] or "").split(",") if one]
        return {ours: data_paths(names, None, given[split])} if names else {}

    return convert


def _filter(given: Given) -> Settings:
    if not given.true("algo.dynamic_filtering_enable"):
        return {}
    low, high = map(float, given["algo.dynamic_filtering_range"])
    # Groups at the bounds are kept here.
    bounds = {"low": low + _INWARDS, "high": high - _INWARDS}
    return {"algorithm.filter.keep": "mean_range", "algorithm.filter.options": bounds}


def _schedule(given: Given) -> Settings:
    if not given.true("train.async_enable"):
        return {}
    found: Settings = {"rollout.schedule": "pipelined", "rollout.max_lag": 1}
    is_corrected = given.true("algo.advantage.is_correction_enable")
    return found if is_corrected else found | {"rollout.allow_uncorrected": True}


def _steps(given: Given) -> Settings:
    return {"runner.steps": int(given["max_steps"])} if given["max_steps"] else {}


_NO_EFFECT = (
    "ref.* critic.num_* reward.num_* train.colocate_* vllm.sync_* vllm.enable_* ckpt.load_* "
    "ckpt.save_hf ckpt.disable_ds ckpt.max_mem ckpt.path ds.* rollout.micro_batch_size "
    "train.micro_batch_size train.dynamic_batch_enable actor.gradient_checkpointing_reentrant "
    "data.d* logger.* reward.clip_range train.full_determinism_enable use_ms local_rank "
    "rollout.max_tokens_per_gpu zero_stage bf16 packing_samples colocate_* vllm_sync_* ref_* "
    "reward_num_* critic_num_* vllm_enable_* adam_offload flash_attn logging_steps load_checkpoint "
    "save_hf_ckpt use_wandb wandb_* enable_prefix_caching micro_* ckpt_path "
    "deepspeed_* use_dynamic_batch use_tensorboard rollout_max_tokens_per_gpu ring_head_stride "
    "attn_implementation save_value_network"
)

FACTS = (
    Fact("actor.model_name_or_path pretrain", "model.path"),
    Fact("data.prompt_dataset prompt_data", "data.train_paths",
         convert=_paths("data.train_paths", "data.prompt_dataset", "data.prompt_split")),
    Fact("data.prompt_split prompt_split", "data.train_paths", "train", convert=elsewhere),
    Fact("eval.dataset eval_dataset", "data.eval_paths",
         convert=_paths("data.eval_paths", "eval.dataset", "eval.split")),
    Fact("eval.split eval_split", "data.eval_paths", "train", convert=elsewhere),
    Fact("data.input_key input_key", "data.prompt_key", "input"),
    Fact("data.label_key label_key", "data.answer_key", None),
    Fact("data.input_template", "data.prompt_template", None,
         note="with {prompt} in place of {}",
         convert=lambda given: {"data.prompt_template":
                                str(given["data.input_template"]).replace("{}", "{prompt}")}
         if given["data.input_template"] else {"data.prompt_template": "{prompt}"}),
    Fact("data.apply_chat_template apply_chat_template", "data.apply_chat_template", False),
    Fact("data.max_samples max_samples", "", int(1e8), note="give a smaller file"),
    Fact("data.prompt_probs prompt_data_probs", "", None, note="see data.train_weights"),
    Fact("data.max_len max_len", "data.max_prompt_tokens", 2048,
         convert=lambda given: {"data.max_prompt_tokens": max(1, given.whole("data.max_len")
                                - (given.whole("rollout.max_new_tokens")
                                   if given["rollout.max_new_tokens"]
                                   and given.whole("rollout.max_new_tokens")
                                   < given.whole("data.max_len")
                                   else given.whole("data.max_len") // 2))},
         note="prompt and response together: less rollout.max_new_tokens, otherwise half"),
    Fact("prompt_max_len", "data.max_prompt_tokens", None, note="of older versions"),
    Fact("rollout.max_new_tokens generate_max_len", "rollout.max_response_tokens", None,
         convert=lambda given: {"rollout.max_response_tokens": _response_tokens(given)}),
    Fact("rollout.batch_size rollout_batch_size", "algorithm.prompts_per_step", 1024),
    Fact("rollout.n_samples_per_prompt n_samples_per_prompt", "algorithm.group_size", 1),
    Fact("train.batch_size train_batch_size", "algorithm.minibatches_per_step", 128,
         convert=lambda given: {"algorithm.minibatches_per_step": _minibatches(given)},
         note=when("counted in samples by OpenRLHF: rollout.batch_size x n_samples_per_prompt / "
                   "train.batch_size optimizer steps", lambda given: True)),
    Fact("train.max_epochs max_epochs", "", 1, note="each sample is used once"),
    Fact("train.max_tokens_per_gpu train_max_tokens_per_gpu", "actor.max_tokens_per_microbatch",
         16192, convert=lambda given: {"actor.max_tokens_per_microbatch":
                                       given.whole("train.max_tokens_per_gpu")
                                       * given.whole("ds.ring_attn_size")
                                       * given.whole("ds.tensor_parallel_size")},
         note="times the GPUs that share a sequence"),
    Fact("rollout.vllm_generate_batch_size", "", None, note="see algorithm.filter.oversample"),
    Fact("rollout.temperature temperature", "rollout.temperature", 1.0),
    Fact("rollout.top_p top_p", "", 1.0, note="training samples from the full distribution here"),
    Fact("algo.advantage.estimator advantage_estimator", "algorithm.advantage", "gae",
         convert=_advantage, note=_no_advantage),
    Fact("algo.advantage.gamma gamma", "value.gamma", 1, convert=_value),
    Fact("algo.advantage.lambd lambd", "value.lam", 1, convert=elsewhere),
    Fact("critic.value_clip value_clip", "value.clip", 0.5, convert=elsewhere),
    Fact("critic.adam.lr critic_learning_rate", "value.optimizer.lr", 9e-6,
         convert=elsewhere),
    Fact("critic.freezing_steps freezing_actor_steps", "value.warmup_steps", -1,
         convert=elsewhere),
    Fact("algo.advantage.no_std_norm no_advantage_std_norm", "", False, note="use dr_grpo"),
    Fact("actor.policy_loss_type policy_loss_type", "algorithm.loss", "ppo", convert=_clip),
    Fact("actor.eps_clip eps_clip", "algorithm.loss_options.clip_low", 0.2,
         convert=elsewhere),
    Fact("actor.eps_clip_low_high eps_clip_low_high", "algorithm.loss_options.clip_high", None,
         convert=elsewhere),
    Fact("actor.dual_clip dual_clip", "algorithm.loss_options.dual_clip", None,
         convert=elsewhere),
    Fact("algo.kl.init_coef init_kl_coef", "algorithm.kl_coef", 0.01, convert=_kl,
         note=when("with estimators other than k1 in the reward; only k1 may be there",
                   lambda given: not given.true("algo.kl.use_loss")
                   and given["algo.kl.estimator"] != "k1"
                   and given.number("algo.kl.init_coef") > 0)),
    Fact("algo.kl.use_loss use_kl_loss", "algorithm.kl_in", False, convert=elsewhere),
    Fact("algo.kl.estimator kl_estimator", "algorithm.kl_estimator", "k1",
         convert=elsewhere),
    Fact("algo.kl.target kl_target", "algorithm.kl_target", None, convert=elsewhere),
    Fact("algo.kl.horizon kl_horizon", "algorithm.kl_horizon_samples", 10000,
         convert=elsewhere),
    Fact("actor.entropy_coef entropy_loss_coef", "algorithm.entropy_coef", None),
    Fact("actor.aux_loss_coef aux_loss_coef", "", 0, note="there is no load-balancing loss"),
    Fact("algo.dynamic_filtering_enable dynamic_filtering", "algorithm.filter.keep", False,
         convert=_filter, note="mean_range"),
    Fact("algo.dynamic_filtering_range dynamic_filtering_reward_range",
         "algorithm.filter.options", [0, 1], convert=elsewhere,
         note="the bounds themselves are kept here and dropped by OpenRLHF, so they are moved "
         "inwards"),
    Fact("algo.advantage.is_correction_enable enable_vllm_is_correction",
         "algorithm.correction.kind", False, convert=_correction),
    Fact("algo.advantage.is_correction_type", "algorithm.correction.kind", "tis",
         convert=elsewhere, note=", ".join(f"{k} is {v}" for k, v in _CORRECTIONS.items())),
    Fact("algo.advantage.is_correction_threshold", "algorithm.correction.high", [0.5, 5.0],
         convert=elsewhere),
    Fact("reward.remote_url remote_rm_url", "reward.items", None, convert=_rewards,
         note="a .py file's reward_func and reward servers work unchanged (docs/rewards.md)"),
    Fact("reward.model_name_or_path reward_pretrain", "", None,
         note="a reward model is a reward of yours that asks its server (docs/rewards.md)"),
    Fact("reward.normalize_enable normalize_reward", "", False, note="rewards stay as they are"),
    Fact("reward.overlong_buffer_len overlong_buffer_len", "reward.items", None,
         convert=elsewhere, note="the reward soft_overlong_punishment"),
    Fact("reward.overlong_penalty_factor overlong_penalty_factor", "reward.items", 1,
         convert=elsewhere),
    Fact("reward.stop_properly_penalty_coef stop_properly_penalty_coef",
         "algorithm.truncated_factor", None, convert=lambda given: {}
         if not 0 <= _truncated_part(given) < 1 else {
             "algorithm.truncated": "scale", "algorithm.truncated_factor": _truncated_part(given)},
         note=when("below 0 it is the reward of a truncated response in OpenRLHF; here the reward "
                   "stop_properly adds it", lambda given: _truncated_part(given) < 0)),
    Fact("actor.adam.lr actor_learning_rate", "actor.optimizer.lr", 1e-6),
    Fact("actor.adam.weight_decay l2", "actor.optimizer.weight_decay", 0.0),
    Fact("actor.adam.betas adam_betas", "actor.optimizer.adam_beta1 actor.optimizer.adam_beta2",
         [0.9, 0.95], convert=lambda given: {
             "actor.optimizer.adam_beta1": given["actor.adam.betas"][0],
             "actor.optimizer.adam_beta2": given["actor.adam.betas"][1]}),
    Fact("actor.adam.eps", "actor.optimizer.adam_eps", 1e-8),
    Fact("actor.lr_scheduler lr_scheduler", "actor.optimizer.schedule", "cosine_with_min_lr",
         {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear",
          "constant": "constant", "constant_with_warmup": "constant"}),
    Fact("actor.min_lr_ratio", "actor.optimizer.min_lr", 0.1, convert=lambda given: {
        "actor.optimizer.min_lr":
        given.number("actor.min_lr_ratio") * given.number("actor.adam.lr")}
        if str(given["actor.lr_scheduler"]) == "cosine_with_min_lr" else {}),
    Fact("actor.lr_warmup_ratio lr_warmup_ratio", "actor.optimizer.warmup_steps", 0.03,
         convert=lambda given: {"actor.optimizer.warmup_steps": math.ceil(
             given.number("actor.lr_warmup_ratio") * given.whole("max_steps")
             * _minibatches(given))} if given["max_steps"] else {},
         note=when("a share of the run, whose length is not known; set "
                   "actor.optimizer.warmup_steps", lambda given: not given["max_steps"])),
    Fact("actor.max_norm max_norm", "actor.optimizer.clip_grad_norm", 1.0),
    Fact("actor.num_nodes actor_num_nodes", "cluster.nodes", 1,
         convert=lambda given: nodes_settings(given.whole("actor.num_nodes"))),
    Fact("actor.num_gpus_per_node actor_num_gpus_per_node", "cluster.gpus_per_node", 8,
         convert=_gpus,
         note=when("GPUs of engines that do not share the actor's are added on one node; on "
                   "several, raise cluster.nodes by theirs",
                   lambda given: not _is_colocated(given) and given.whole("actor.num_nodes") > 1)),
    Fact("train.colocate_all colocate_all_models", "cluster.placement", False,
         convert=lambda given: {"cluster.placement": "colocated"
                                if _is_colocated(given) else "separate"},
         note="with train.async_enable separate, as in OpenRLHF"),
    Fact("vllm.num_engines vllm_num_engines", "rollout.engines", None),
    Fact("vllm.tensor_parallel_size vllm_tensor_parallel_size", "rollout.tensor_parallel", 1),
    Fact("vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
         "rollout.gpu_memory_utilization", 0.95),
    Fact("vllm.enforce_eager enforce_eager", "rollout.enforce_eager", False),
    Fact("ds.ring_attn_size ring_attn_size", "actor.context_parallel", 1),
    Fact("ds.tensor_parallel_size ds_tensor_parallel_size", "actor.tensor_parallel", 1),
    Fact("ds.lora.rank lora_rank", "actor.lora.rank", 0, convert=lambda given: lora_settings(
        given["ds.lora.rank"], given["ds.lora.alpha"], None)),
    Fact("ds.lora.alpha lora_alpha", "actor.lora.alpha", 16, convert=elsewhere),
    Fact("actor.gradient_checkpointing_enable gradient_checkpointing", "actor.recompute", False,
         convert=lambda given: {"actor.recompute": "full"}
         if given.true("actor.gradient_checkpointing_enable") else {}),
    Fact("train.num_episodes num_episodes", "runner.steps", 1, convert=_steps,
         note=when(EPOCHS.replace("epochs", "episodes"), lambda given: not given["max_steps"])),
    Fact("max_steps", "runner.steps", None, convert=elsewhere),
    Fact("train.seed seed", "runner.seed", 42),
    Fact("ckpt.save_steps save_steps", "runner.save_every", -1,
         convert=every("runner.save_every", "ckpt.save_steps")),
    Fact("ckpt.max_num max_ckpt_num", "runner.keep_checkpoints", 3),
    Fact("eval.steps eval_steps", "eval.every", -1,
         convert=every("eval.every", "eval.steps")),
    Fact("eval.temperature eval_temperature", "eval.temperature", 0.6),
    Fact("eval.n_samples_per_prompt", "eval.samples", 4),
    Fact("ckpt.output_dir save_path", "runner.run_dir", None),
    Fact("train.async_enable async_train", "rollout.schedule", False, convert=_schedule,
         note=when("without a correction, tokens of older weights are trained on as they are; "
                   "algorithm.correction.kind=token_truncate corrects", lambda given:
                   given.true("train.async_enable")
                   and not given.true("algo.advantage.is_correction_enable"))),
    Fact("train.partial_rollout_enable partial_rollout", "", False, note="see docs/schedules.md"),
    Fact("train.agent_func_path agent_func_path", "", None,
         note="see OpenRLHFAgent in docs/tools.md"),
    Fact("actor.* critic.* train.* algo.* reward.* eval.* data.* vllm.* rollout.*", "",
         note="not in the table; nothing is taken from it"),
    Fact(_NO_EFFECT, "", harmless=True),
)  # fmt: skip

OPENRLHF = Framework(
    "OpenRLHF",
    "0.11",
    FACTS,
    always=(
        "OpenRLHF adds 1e-9 to a group's standard deviation, which is set; both divide by n - 1",
    ),
    base={
        "reward.correct": 1.0,
        "reward.incorrect": 0.0,
        "algorithm.early_stop_ratio": None,
        "cluster.device": "cuda",
    },
    run_length=lambda given, rows: {
        "max_steps": math.ceil(
            given.number("train.num_episodes") * rows / given.whole("rollout.batch_size")
        )
    },
)
