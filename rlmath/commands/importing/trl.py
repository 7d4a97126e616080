"""TRL's GRPOConfig (1.16) and its counterparts."""

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
    lora_settings,
    trackers,
    when,
)
from rlmath.errors import UserError
from rlmath.model.lora import ALL_TARGETS
from rlmath.rewards.registry import available_rewards

_LOSS_TYPES = {
    "grpo": "seq_mean_token_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "seq_sum_constant",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
    "luspo": "seq_mean_token_sum",
}
_CORRECTIONS = {
    "token_truncate": "token_truncate",
    "token_mask": "token_mask",
    "sequence_truncate": "seq_truncate",
    "sequence_mask": "seq_mask_sum",
}


def _steps_per_generation(given: Given) -> int:
    if given["steps_per_generation"]:
        return given.whole("steps_per_generation")
    if given["generation_batch_size"]:
        each = given.whole("per_device_train_batch_size") * given.whole("processes")
        return max(1, given.whole("generation_batch_size") // each)
    return given.whole("gradient_accumulation_steps")


def minibatches(given: Given) -> int:
    """Optimizer steps of a generation."""
    return max(1, _steps_per_generation(given) // given.whole("gradient_accumulation_steps"))


def _batch(given: Given) -> Settings:
    each = given.whole("per_device_train_batch_size") * given.whole("processes")
    steps = max(_steps_per_generation(given), given.whole("gradient_accumulation_steps"))
    size = given.whole("num_generations")
    prompts, rest = divmod(each * steps, size)
    if rest or not prompts:
        raise UserError(
            f"per_device_train_batch_size={given['per_device_train_batch_size']} x "
            f"{given['processes']} processes x {steps} batches = {each * steps} completions are no "
            f"multiple of num_generations={size}; give the number of GPUs of your accelerate "
            "launch as --gpus N"
        )
    return {
        "algorithm.prompts_per_step": prompts,
        "algorithm.group_size": size,
        "algorithm.minibatches_per_step": minibatches(given),
    }


def _loss(given: Given) -> Settings:
    kind = str(given["loss_type"])
    by_sequence = given["importance_sampling_level"] == "sequence"
    high = given["epsilon_high"] if given["epsilon_high"] is not None else given["epsilon"]
    low = min(1.0, given.number("epsilon"))  # A bound below 0 has no effect.
    loss, options = "ppo_clip", {"clip_low": low, "clip_high": high}
    if kind == "cispo":
        loss = "cispo"
        options = {"clip_low": 1.0, "clip_high": max(0.0, float(high) - 1)}
    elif kind == "sapo":
        loss = "sapo"
        options = {
            "tau_positive": given["sapo_temperature_pos"],
            "tau_negative": given["sapo_temperature_neg"],
        }
    else:
        loss = "gspo" if by_sequence else "ppo_clip"
        options["dual_clip"] = given["delta"]
    aggregation = _LOSS_TYPES.get(kind, "token_mean")
    found: Settings = {
        "algorithm.loss": loss,
        "algorithm.loss_options": options,
        "algorithm.aggregation": aggregation,
    }
    if loss == "gspo" and not aggregation.startswith("seq_mean"):
        found["algorithm.allow_other_aggregation"] = True
    return found


def _loss_note(given: Given) -> str:
    """grpo is seq_mean_token_mean, dapo and cispo token_mean, bnpo token_mean of each micro-batch,
    dr_grpo seq_sum_constant, luspo gspo with seq_mean_token_sum; vespo has no counterpart."""
    kind = str(given["loss_type"])
    if kind == "bnpo":
        return (
            "bnpo divides by the tokens of a micro-batch and averages over these; token_mean "
            "divides by the tokens of the whole optimizer minibatch"
        )
    if kind in ("dapo", "cispo") and minibatches(given) > 1:
        return (
            f"{kind} divides by the mean number of tokens of the generation's optimizer steps, "
            "token_mean by each step's own"
        )
    if kind == "dr_grpo":
        return "divided by max_completion_length, here rollout.max_response_tokens"
    return "" if kind in _LOSS_TYPES else f"{kind} has no counterpart; dapo is set in its place"


def _advantage(given: Given) -> Settings:
    scale = given["scale_rewards"]
    scale = {True: "group", False: "none"}.get(scale, scale) if isinstance(scale, bool) else scale
    name = {"group": "grpo", "batch": "batch_std", "none": "dr_grpo"}.get(str(scale), "grpo")
    if given["multi_objective_aggregation"] == "normalize_then_sum":
        name = "gdpo"
    found: Settings = {"algorithm.advantage": name}
    return found if name == "dr_grpo" else found | {"algorithm.advantage_options.epsilon": 1e-4}


def _kl(given: Given) -> Settings:
    beta = given.number("beta")
    if not beta:
        return {"algorithm.kl_coef": 0.0}
    kind = "k3_unbiased" if given.true("use_bias_correction_kl") else "k3"
    found: Settings = {"algorithm.kl_coef": beta, "algorithm.kl_estimator": kind}
    if given.true("sync_ref_model"):
        found |= {
            "algorithm.reference.kind": "averaged",
            "algorithm.reference.every": _rollouts(given, "ref_model_sync_steps"),
            "algorithm.reference.decay": round(1 - given.number("ref_model_mixup_alpha"), 9),
        }
    return found


def _correction(given: Given) -> Settings:
    if not (given.true("use_vllm") and given.true("vllm_importance_sampling_correction")):
        return {}
    mode = str(given["vllm_importance_sampling_mode"])
    kind = _CORRECTIONS.get(mode, "seq_mask_sum")
    found: Settings = {"algorithm.correction.kind": kind}
    if given["vllm_importance_sampling_clip_max"] is not None:
        found["algorithm.correction.high"] = given["vllm_importance_sampling_clip_max"]
    if "mask" in kind:
        # TRL has no lower bound where none is given, and ours has a default.
        found["algorithm.correction.low"] = given["vllm_importance_sampling_clip_min"] or 1e-9
    return found


def _entropy(given: Given) -> Settings:
    if not given.true("use_adaptive_entropy"):
        return {"algorithm.entropy_coef": given["entropy_coef"]}
    return {
        "algorithm.entropy_coef": given["entropy_coef"],
        "algorithm.entropy_target": given["entropy_target"],
        "algorithm.entropy_coef_step": given["entropy_coef_delta"],
        "algorithm.entropy_coef_max": given["entropy_coef_max"],
    }


def _rollouts(given: Given, key: str) -> int:
    """A number of optimizer steps in rollouts."""
    return max(1, math.ceil(given.number(key) / minibatches(given)))


def _steps(given: Given) -> Settings:
    return {"runner.steps": _rollouts(given, "max_steps")} if given.number("max_steps") > 0 else {}


def _steps_note(given: Given) -> str:
    """TRL counts optimizer steps, rlmath rollouts; epochs need --rows."""
    return "" if given.number("max_steps") > 0 else EPOCHS


def _warmup(given: Given) -> Settings:
    steps = given.number("warmup_steps")
    if not steps and given["warmup_ratio"]:
        steps = given.number("warmup_ratio")
    if 0 < steps < 1:  # A share of the run.
        steps = max(0.0, given.number("max_steps")) * steps
    return {"actor.optimizer.warmup_steps": math.ceil(steps)}


def _warmup_note(given: Given) -> str:
    """A share of the run, if below 1."""
    if given["warmup_ratio"] and given.number("max_steps") <= 0:
        return "a share of the run, whose length is not known; set actor.optimizer.warmup_steps"
    return ""


def _schedule(given: Given) -> Settings:
    name = str(given["lr_scheduler_type"]).rpartition(".")[2].lower()
    name = "cosine" if name.startswith("cosine") else name
    found: Settings = {
        "actor.optimizer.schedule": name if name in ("linear", "cosine") else "constant"
    }
    more = given["lr_scheduler_kwargs"]
    if isinstance(more, dict) and found["actor.optimizer.schedule"] == "cosine":
        low = more.get("min_lr", more.get("min_lr_rate", 0) * given.number("learning_rate"))
        found["actor.optimizer.min_lr"] = low
    return found


def _every(ours: str, strategy: str, steps: str) -> Callable[[Given], Settings]:
    def convert(given: Given) -> Settings:
        if str(given[strategy]).rpartition(".")[2].lower() != "steps":
            return {ours: 0}
        return {ours: _rollouts(given, steps)} if given.number(steps) >= 1 else {}

    return convert


def _dtype(given: Given) -> Settings:
    is_full = given["bf16"] is False and not given.true("fp16")
    return {"model.dtype": "float32" if is_full else "bfloat16"}


def _rewards(given: Given) -> Settings:
    names, weights = given["reward_funcs"], given["reward_weights"]
    if names is None:
        # Weights for rewards without a name cannot be converted.
        return {"reward.items": [{"name": "math"}]}
    names = names if isinstance(names, list) else [names]
    items: list[dict[str, Any]] = [{"name": str(name)} for name in names]
    if isinstance(weights, list) and len(weights) == len(items):
        items = [one | {"weight": float(w)} for one, w in zip(items, weights, strict=True)]
    return {"reward.items": items}


def _rewards_note(given: Given) -> str:
    """functions of a script are written to NAME_rewards.py, with what they use from it;
    trl.rewards.accuracy_reward is math; without any, the reward math."""
    names = given["reward_funcs"]
    names = names if isinstance(names, list) else [names]
    unknown = [str(one) for one in names if one and ":" not in str(one)]
    unknown = [one for one in unknown if one not in available_rewards()]
    if names == [None]:
        return "the file names no reward functions; the reward math is set (1 and 0)"
    if unknown:
        return f"{', '.join(unknown)}: give the file, as rewards.py:{unknown[0]}"
    return ""


def _placement(given: Given) -> Settings:
    gpus = given.whole("processes")
    if not (given.true("use_vllm") and given["vllm_mode"] == "server"):
        return {"cluster.gpus_per_node": gpus}
    return {
        "cluster.placement": "separate",
        "cluster.gpus_per_node": gpus + 1,
        "actor.data_parallel": gpus,
        "rollout.engines": 1,
    }


def _lora(given: Given) -> Settings:
    return lora_settings(given["lora_r"], given["lora_alpha"], given["lora_target_modules"])


def _lora_note(given: Given) -> str:
    """those that exist here; without any, all."""
    targets = given["lora_target_modules"]
    unknown = (
        [one for one in targets if one not in ALL_TARGETS] if isinstance(targets, list) else []
    )
    return f"{', '.join(unknown)}: no such matrix here" if unknown else ""


def _data(given: Given) -> Settings:
    name, config = given["dataset_name"], given["dataset_config"]
    if not name:
        return {}
    name = name.get("train", name) if isinstance(name, dict) else name
    return {"data.train_paths": data_paths(name, config, given["dataset_train_split"])}


_FULL = "training samples from the full distribution here"
# Without an effect on what is learned: kernels, sharding, memory, logs.
_NO_EFFECT = """
log_completions log_multimodal num_completions_to_print log_unique_prompts logging_* log_*
wandb_* vllm_server_* vllm_group_port vllm_enable_sleep_mode vllm_model_impl
vllm_max_model_length vllm_device vllm_dtype vllm_max_model_len vllm_guided_decoding_regex
remove_unused_columns pad_to_multiple_of ds3_gather_for_generation disable_dropout
model_init_kwargs trust_remote_code cache_implementation optim use_liger_* push_to_hub hub_*
dataloader_* ddp_* deepspeed fsdp* gradient_checkpointing_kwargs torch_* attn_implementation
overwrite_output_dir do_eval do_train per_device_eval_batch_size eval_accumulation_steps
eval_on_start eval_delay eval_do_* fp16_full_eval bf16_full_eval save_only_model save_safe*
save_total_* load_best_model_at_end include_* average_tokens_across_devices tf32
use_transformers_* transformers_* accelerator_config unsloth_* use_peft lora_dropout
model_revision resume_from_checkpoint project trackio_* disable_tqdm label_names
generation_kwargs dataset_test_split load_in_4bit load_in_8bit dtype callbacks benchmarks
chat_template_kwargs max_seq_length full_determinism restore_callback_states_from_checkpoint
metric_for_best_model greater_is_better local_rank parallel_mode prediction_loss_only
use_cpu data_seed no_cuda group_by_length length_column_name neftune_noise_alpha
"""

FACTS = (
    Fact("model_name_or_path model", "model.path"),
    Fact("dataset_name train_dataset", "data.train_paths", convert=_data,
         note="rows of load_dataset as they are; a data set that the script changes has to be "
         "written to a file"),
    Fact("dataset_config", "data.train_paths", convert=elsewhere),
    Fact("dataset_train_split", "data.train_paths", convert=elsewhere),
    Fact("dataset_prompt_column", "data.prompt_key", "prompt"),
    Fact("system_prompt", "data.system_prompt"),
    Fact("reward_funcs", "reward.items", convert=_rewards, note=_rewards_note),
    Fact("reward_weights", "reward.items", convert=elsewhere,
         note=when("the file names no reward functions; give the weights in reward.items",
                   lambda given: given["reward_funcs"] is None
                   and given["reward_weights"] is not None)),
    Fact("multi_objective_aggregation", "algorithm.advantage", "sum_then_normalize",
         convert=_advantage, note="normalize_then_sum is gdpo"),
    Fact("scale_rewards", "algorithm.advantage", "group", convert=_advantage,
         note="group is grpo, batch is batch_std, none is dr_grpo"),
    Fact("num_generations", "algorithm.group_size", 8, convert=_batch),
    Fact("per_device_train_batch_size", "algorithm.prompts_per_step", 8, convert=_batch,
         note=when("completions of each process in TRL, prompts of the whole run here: x processes "
                   "x steps_per_generation / num_generations", lambda given: True)),
    Fact("processes num_processes", "cluster.gpus_per_node", 1, convert=_placement,
         note=when("the number of GPUs stands in accelerate's command; give it as --gpus N, and "
                   "the batch changes with it", lambda given: "processes" not in given)),
    Fact("gradient_accumulation_steps", "algorithm.minibatches_per_step", 1, convert=_batch,
         note="micro-batches are packed by tokens; steps_per_generation / "
         "gradient_accumulation_steps optimizer steps"),
    Fact("steps_per_generation", "algorithm.minibatches_per_step", convert=_batch),
    Fact("generation_batch_size", "algorithm.prompts_per_step", convert=_batch),
    Fact("num_iterations", "", 1, note="each sample is used once; use more minibatches"),
    Fact("max_prompt_length", "data.max_prompt_tokens", None,
         note=when("older TRL cuts longer prompts; here they are left out",
                   lambda given: given["max_prompt_length"] is not None)),
    Fact("max_completion_length", "rollout.max_response_tokens", 512),
    Fact("shuffle_dataset", "data.shuffle", True),
    Fact("seed", "runner.seed", 42),
    Fact("temperature", "rollout.temperature", 1.0),
    Fact("top_p", "", 1.0, note=_FULL),
    Fact("top_k", "", 0, note=_FULL),
    Fact("min_p", "", None, note=_FULL),
    Fact("repetition_penalty", "", 1.0, note=_FULL),
    Fact("vllm_structured_outputs_regex", "", None, note=_FULL),
    Fact("vllm_sampling_params", "", None, note=_FULL),
    Fact("num_generations_eval", "eval.samples", None),
    Fact("loss_type", "algorithm.loss algorithm.aggregation", "dapo", convert=_loss,
         note=_loss_note),
    Fact("importance_sampling_level", "algorithm.loss", "token", convert=_loss,
         note=when("sequence is gspo; with a loss_type other than grpo and luspo it is not the "
                   "paper's", lambda given: given["importance_sampling_level"] == "sequence"
                   and given["loss_type"] not in ("grpo", "luspo"))),
    Fact("epsilon", "algorithm.loss_options.clip_low", 0.2, convert=_loss),
    Fact("epsilon_high", "algorithm.loss_options.clip_high", None, convert=_loss,
         note=when("of cispo the largest ratio: clip_high is 1 less",
                   lambda given: given["loss_type"] == "cispo")),
    Fact("delta", "algorithm.loss_options.dual_clip", None, convert=_loss),
    Fact("sapo_temperature_pos", "algorithm.loss_options.tau_positive", 1.0, convert=_loss),
    Fact("sapo_temperature_neg", "algorithm.loss_options.tau_negative", 1.05, convert=_loss),
    Fact("vespo_*", "", note="vespo has no counterpart"),
    Fact("beta", "algorithm.kl_coef", 0.0, convert=_kl,
         note=when("in the loss, with the loss's own weights, in both",
                   lambda given: bool(given.number("beta")))),
    Fact("use_bias_correction_kl", "algorithm.kl_estimator", True, convert=_kl,
         note="k3_unbiased, otherwise k3"),
    Fact("sync_ref_model", "algorithm.reference.kind", False, convert=_kl),
    Fact("ref_model_sync_steps", "algorithm.reference.every", 512, convert=_kl,
         note="optimizer steps in TRL, rollouts here"),
    Fact("ref_model_mixup_alpha", "algorithm.reference.decay", 0.6, convert=_kl,
         note="the decay is 1 less alpha"),
    Fact("entropy_coef", "algorithm.entropy_coef", 0.0, convert=_entropy,
         note=when("TRL takes the mean over tokens whatever the loss_type; here it has the loss's "
                   "weights", lambda given: bool(given["entropy_coef"]))),
    Fact("use_adaptive_entropy", "algorithm.entropy_target", False, convert=_entropy),
    Fact("entropy_target", "algorithm.entropy_target", 0.2, convert=_entropy),
    Fact("entropy_coef_delta", "algorithm.entropy_coef_step", 0.005, convert=_entropy),
    Fact("entropy_coef_max", "algorithm.entropy_coef_max", 1.0, convert=_entropy),
    Fact("entropy_coef_min", "", 0.0, note="0 here"),
    Fact("top_entropy_quantile", "algorithm.entropy_top_share", 1.0),
    Fact("mask_truncated_completions", "algorithm.truncated", False,
         convert=lambda given: {"algorithm.truncated": "mask"}
         if given.true("mask_truncated_completions") else {}),
    Fact("use_vllm", "", False, harmless=True, note="vLLM always samples"),
    Fact("vllm_mode", "cluster.placement", "colocate", convert=_placement,
         note=when("server: its GPUs belong to the run and are counted as one; raise "
                   "cluster.gpus_per_node and rollout.engines to what they are",
                   lambda given: given.true("use_vllm") and given["vllm_mode"] == "server")),
    Fact("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", 0.3),
    Fact("vllm_tensor_parallel_size", "rollout.tensor_parallel", 1),
    Fact("vllm_importance_sampling_correction", "algorithm.correction.kind", True,
         convert=_correction),
    Fact("vllm_importance_sampling_mode", "algorithm.correction.kind", "sequence_mask",
         convert=_correction, note=", ".join(f"{k} is {v}" for k, v in _CORRECTIONS.items())),
    Fact("vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
         "algorithm.correction.high", 3.0, convert=_correction),
    Fact("vllm_importance_sampling_clip_min", "algorithm.correction.low", None,
         convert=_correction),
    Fact("off_policy_mask_threshold", "algorithm.correction.off_policy_mask_kl", None),
    Fact("cast_lm_head_to_fp32", "precision.lm_head_dtype", False,
         convert=lambda given: {"precision.lm_head_dtype": "float32"}
         if given.true("cast_lm_head_to_fp32") else {}),
    Fact("router_aux_loss_coef", "", None, note="there is no load-balancing loss"),
    Fact("max_tool_calling_iterations", "", None, note="see rollout.max_turns (docs/tools.md)"),
    Fact("learning_rate", "actor.optimizer.lr", 1e-6),
    Fact("lr_scheduler_type", "actor.optimizer.schedule", "linear", convert=_schedule),
    Fact("lr_scheduler_kwargs", "actor.optimizer.min_lr", convert=_schedule),
    Fact("warmup_steps", "actor.optimizer.warmup_steps", 0, convert=_warmup),
    Fact("warmup_ratio", "actor.optimizer.warmup_steps", None, convert=_warmup,
         note=_warmup_note),
    Fact("weight_decay", "actor.optimizer.weight_decay", 0.0),
    Fact("adam_beta1", "actor.optimizer.adam_beta1", 0.9),
    Fact("adam_beta2", "actor.optimizer.adam_beta2", 0.999),
    Fact("adam_epsilon", "actor.optimizer.adam_eps", 1e-8),
    Fact("max_grad_norm", "actor.optimizer.clip_grad_norm", 1.0),
    Fact("bf16", "model.dtype", None, convert=_dtype),
    Fact("fp16", "model.dtype", False, convert=_dtype,
         note=when("bfloat16 here", lambda given: given.true("fp16"))),
    Fact("gradient_checkpointing use_gradient_checkpointing", "actor.recompute", True,
         convert=lambda given: {} if given["gradient_checkpointing"] is False
         else {"actor.recompute": "full"}),
    Fact("lora_r r", "actor.lora.rank", None, convert=_lora),
    Fact("lora_alpha", "actor.lora.alpha", 16, convert=_lora),
    Fact("lora_target_modules target_modules", "actor.lora.targets", convert=_lora,
         note=_lora_note),
    Fact("max_steps", "runner.steps", -1, convert=_steps,
         note=when("optimizer steps in TRL, rollouts here",
                   lambda given: given.number("max_steps") > 0 and minibatches(given) > 1)),
    Fact("num_train_epochs", "runner.steps", 3.0, convert=_steps, note=_steps_note),
    Fact("save_strategy", "runner.save_every", "steps",
         convert=_every("runner.save_every", "save_strategy", "save_steps")),
    Fact("save_steps", "runner.save_every", 500,
         convert=_every("runner.save_every", "save_strategy", "save_steps")),
    Fact("eval_strategy evaluation_strategy", "eval.every", "no",
         convert=_every("eval.every", "eval_strategy", "eval_steps")),
    Fact("eval_steps", "eval.every", 500,
         convert=_every("eval.every", "eval_strategy", "eval_steps")),
    Fact("output_dir", "runner.run_dir"),
    Fact("report_to", "runner.trackers", "none", convert=trackers("report_to")),
    Fact("run_name", "", None, harmless=True, note="the run folder's name"),
    Fact(_NO_EFFECT, "", harmless=True),
)  # fmt: skip

TRL = Framework(
    "TRL",
    "1.16",
    FACTS,
    always=(
        "TRL adds 1e-4 to the standard deviation that advantages are divided by, which is set; "
        "both divide by n - 1",
        "the rollout log-probs are at the sampling temperature in both",
        "the accepted answer is data.answer_key; reward functions get every column of the row",
    ),
    base={
        "data.answer_key": "solution",
        "data.prompt_template": "{prompt}",
        "reward.correct": 1.0,
        "reward.incorrect": 0.0,
        "algorithm.early_stop_ratio": None,
        "cluster.device": "cuda",
    },
    run_length=lambda given, rows: {
        "max_steps": given["max_steps"] if given.number("max_steps") > 0
        else minibatches(given) * math.ceil(
            given.number("num_train_epochs") * rows / _batch(given)["algorithm.prompts_per_step"]
        )
    }
)  # fmt: skip
