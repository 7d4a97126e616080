"""Conversions of verl's settings (0.9) that depend on several values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlmath.commands.importing.fact import (
    EPOCHS,
    Given,
    Settings,
    kl_in_reward,
    lora_settings,
    overlong_reward,
)

ACTOR, ROOT = "actor_rollout_ref.actor.", "actor_rollout_ref."
_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "gpg": "reinforce",
}
_ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "gae",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gdpo": "gdpo",
}
_KL = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k2",
    "k1+": "k2",
    "low_var_kl+": "k2",
    "k3+": "k2",
}
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."


def minibatches(given: Given) -> int:
    """Optimizer steps of a rollout."""
    prompts, each = given.whole("data.train_batch_size"), given.whole(ACTOR + "ppo_mini_batch_size")
    return max(1, prompts // each)


def advantage(given: Given) -> Settings:
    name = _ADVANTAGES.get(str(given["algorithm.adv_estimator"]), "grpo")
    unscaled = not given.true("algorithm.norm_adv_by_std_in_grpo")
    found: Settings = {"algorithm.advantage": "dr_grpo" if name == "grpo" and unscaled else name}
    if name == "gae":
        found |= {
            "value.gamma": given["algorithm.gamma"],
            "value.lam": given["algorithm.lam"],
            "value.clip": given["critic.cliprange_value"],
            "value.warmup_steps": given["trainer.critic_warmup"],
            "value.optimizer.lr": given["critic.optim.lr"],
            "value.optimizer.weight_decay": given["critic.optim.weight_decay"],
            "value.optimizer.adam_beta2": 0.999,
            "value.optimizer.warmup_steps": 0,
        }
    return found


def no_advantage(given: Given) -> str:
    """OPO, ReMax, GPG, pass@k of verl and the optimal token baselines have no counterpart."""
    name = str(given["algorithm.adv_estimator"])
    return "" if name in _ADVANTAGES else f"{name} has no counterpart; grpo is set in its place"


def no_loss(given: Given) -> str:
    """clip_cov, kl_cov and dro have no counterpart."""
    mode = str(given[ACTOR + "policy_loss.loss_mode"])
    if (
        mode.startswith("dppo")
        and given[ACTOR + "clip_ratio_low"] != given[ACTOR + "clip_ratio_high"]
    ):
        return "one threshold here, that of clip_ratio_high"
    return "" if mode in _LOSSES else f"{mode} has no counterpart; ppo_clip is set in its place"


def policy_loss(given: Given) -> Settings:
    mode = str(given[ACTOR + "policy_loss.loss_mode"])
    loss = _LOSSES.get(mode, "ppo_clip")
    low, high = (
        given[ACTOR + f"clip_ratio{one}"] if given[ACTOR + f"clip_ratio{one}"] is not None
        else given[ACTOR + "clip_ratio"] for one in ("_low", "_high")
    )  # fmt: skip
    options: Settings = {}
    if loss in ("ppo_clip", "gspo_token", "gmpo", "cispo"):
        options = {"clip_low": min(float(low), 1.0), "clip_high": high}
    if loss == "ppo_clip":
        options["dual_clip"] = given[ACTOR + "clip_ratio_c"]
    if loss == "sapo":
        options = {
            "tau_positive": given[ACTOR + "tau_pos"], "tau_negative": given[ACTOR + "tau_neg"]
        }  # fmt: skip
    if loss == "dppo":
        options = {"divergence": mode.removeprefix("dppo_"), "threshold": high}
    return {"algorithm.loss": loss, "algorithm.loss_options": options}


def aggregation(given: Given) -> Settings:
    mode, loss = str(given[ACTOR + "loss_agg_mode"]), str(given[ACTOR + "policy_loss.loss_mode"])
    if loss in ("gspo", "sapo", "geo_mean"):  # They take this one, whatever is given.
        mode = "seq-mean-token-mean"
    name = _AGGREGATIONS.get(mode, "token_mean")
    found: Settings = {"algorithm.aggregation": name}
    if name == "seq_sum_constant" and given[ACTOR + "loss_scale_factor"] is not None:
        found["algorithm.aggregation_constant_tokens"] = given[ACTOR + "loss_scale_factor"]
    return found


_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_sum_constant",
}


def no_aggregation(given: Given) -> str:
    """token-sum has no counterpart; gspo, sapo and geo_mean take seq-mean-token-mean always."""
    mode = str(given[ACTOR + "loss_agg_mode"])
    return "" if mode in _AGGREGATIONS else f"{mode} has no counterpart; token_mean is set instead"


def kl_penalty(given: Given) -> Settings:
    if given.true(ACTOR + "use_kl_loss"):
        estimator = _KL.get(str(given[ACTOR + "kl_loss_type"]), "k3")
        return {
            "algorithm.kl_coef": given[ACTOR + "kl_loss_coef"],
            "algorithm.kl_estimator": estimator,
        }
    in_reward = given.true("algorithm.use_kl_in_reward")
    if not in_reward or not given.number("algorithm.kl_ctrl.kl_coef"):
        return {"algorithm.kl_coef": 0.0}
    coef, target = (given[f"algorithm.kl_ctrl.{key}"] for key in ("kl_coef", "target_kl"))
    if given["algorithm.kl_ctrl.type"] != "adaptive":
        return kl_in_reward(coef)
    return kl_in_reward(coef, target, given.whole("algorithm.kl_ctrl.horizon"))


def kl_place(given: Given) -> str:
    """with both, the one in the loss is taken; an estimator that ends in + has k2's gradient, and
    abs has no counterpart."""
    if not given.true(ACTOR + "use_kl_loss"):
        return ""
    if given.true("algorithm.use_kl_in_reward"):
        return "there is one KL penalty here, in the loss or in the reward; the loss's is taken"
    kind = str(given[ACTOR + "kl_loss_type"])
    if kind not in _KL:
        return f"kl_loss_type={kind} has no counterpart; k3 is set in its place"
    return f"kl_loss_type={kind}: k2 has its gradient, not its value" if "+" in kind else ""


def warmup(given: Given) -> Settings:
    steps = given.number(ACTOR + "optim.lr_warmup_steps")
    total = given["trainer.total_training_steps"]
    if steps <= 0:
        ratio = given.number(ACTOR + "optim.lr_warmup_steps_ratio")
        steps = round(ratio * int(total)) if total else 0
    return {"actor.optimizer.warmup_steps": int(steps) * minibatches(given)}


def warmup_note(given: Given) -> str:
    """verl counts rollouts, rlmath optimizer steps: multiplied by minibatches_per_step."""
    if given.number(ACTOR + "optim.lr_warmup_steps") > 0:
        return "counted in rollouts by verl and in optimizer steps here; multiplied accordingly"
    if (
        given.number(ACTOR + "optim.lr_warmup_steps_ratio")
        and not given["trainer.total_training_steps"]
    ):
        return (
            "lr_warmup_steps_ratio is a part of the run, whose number of steps is not known; "
            "set actor.optimizer.warmup_steps"
        )
    return ""


def min_lr(given: Given) -> Settings:
    ratio = given[ACTOR + "optim.min_lr_ratio"]
    value = given[ACTOR + "optim.min_lr"] or (ratio or 0) * given.number(ACTOR + "optim.lr")
    return {"actor.optimizer.min_lr": value} if schedule(given) != "constant" else {}


def schedule(given: Given) -> str:
    name = str(given[ACTOR + "optim.lr_decay_style"])
    return name if name in ("linear", "cosine") else "constant"


def tokens(given: Given) -> Settings:
    context = max(
        given.whole(ACTOR + "megatron.context_parallel_size"),
        given.whole(ACTOR + "ulysses_sequence_parallel_size"),
    )
    if given.true(ACTOR + "use_dynamic_bsz"):
        budget = given.whole(ACTOR + "ppo_max_token_len_per_gpu")
    else:
        each = given[ACTOR + "ppo_micro_batch_size_per_gpu"] or 1
        lengths = given.whole("data.max_prompt_length") + given.whole("data.max_response_length")
        budget = int(each) * lengths
    found: Settings = {"actor.max_tokens_per_microbatch": budget * context}
    if context > 1:
        found["actor.context_parallel"] = context
    return found


def tensor_parallel(given: Given) -> Settings:
    size = given.whole(ACTOR + "megatron.tensor_model_parallel_size")
    on = size > 1 and given.true(ACTOR + "megatron.sequence_parallel")
    return {"actor.tensor_parallel": size} | ({"actor.sequence_parallel": True} if on else {})


def offload(given: Given) -> Settings:
    places = (ACTOR + "megatron.", ACTOR + "fsdp_config.")
    if any(given.true(place + "param_offload") for place in places):
        return {"actor.offload": "all"}
    on = any(given.true(place + "optimizer_offload") for place in places)
    return {"actor.offload": "optimizer"} if on else {}


def recompute(given: Given) -> Settings:
    kind = given[ACTOR + "megatron.override_transformer_config.recompute_granularity"]
    is_megatron = given[ACTOR + "strategy"] == "megatron" or given["model_engine"] == "megatron"
    if not is_megatron and given.true(ROOT + "model.enable_gradient_checkpointing"):
        kind = "full"
    found: Settings = {"actor.recompute": kind} if kind in ("full", "selective") else {}
    layers = given[ACTOR + "megatron.override_transformer_config.recompute_num_layers"]
    if kind == "full" and is_megatron and layers:
        method = given[ACTOR + "megatron.override_transformer_config.recompute_method"]
        if str(method) == "block":
            found["actor.recompute_num_layers"] = layers
    return found


def correction(given: Given) -> Settings:
    level = given["algorithm.rollout_correction.rollout_is"]
    if level in (None, False, "null", "None"):
        return {}
    threshold = str(given["algorithm.rollout_correction.rollout_is_threshold"])
    low, _, high = threshold.rpartition("_")
    kind = "seq" if level == "sequence" else "token"
    found: Settings = {"algorithm.correction.high": float(high)}
    if not low:
        return found | {"algorithm.correction.kind": f"{kind}_truncate"}
    name = "seq_mask_sum" if kind == "seq" else "token_mask"
    return found | {"algorithm.correction.kind": name, "algorithm.correction.low": float(low)}


def prompts(given: Given) -> Settings:
    is_filtered = given.true("data.filter_overlong_prompts")
    stops = str(given["data.truncation"]) == "error" and not is_filtered
    return {"data.overlong_prompts": "stop" if stops else "filter"}


def paths(ours: str, key: str) -> Callable[[Given], Settings]:
    def convert(given: Given) -> Settings:
        value = given[key]
        if value in (None, ""):
            return {}
        return {ours: [str(one) for one in (value if isinstance(value, list) else [value])]}

    return convert


def group_filter(given: Given) -> Settings:
    if not given.true("algorithm.filter_groups.enable"):
        return {}
    metric = str(given["algorithm.filter_groups.metric"])
    rounds = given.whole("algorithm.filter_groups.max_num_gen_batches")
    found: Settings = {
        "algorithm.filter.keep": "accuracy" if metric == "acc" else "variance",
        "algorithm.filter.max_rounds": rounds if rounds > 0 else 100,
    }
    if given["data.gen_batch_size"]:
        share = given.number("data.gen_batch_size") / given.number("data.train_batch_size")
        limit = min(4.0, found["algorithm.filter.max_rounds"])
        found["algorithm.filter.oversample"] = min(max(share, 1.0), limit)
    return found


def rewards(given: Given) -> Settings:
    path = given["reward.custom_reward_function.path"]
    name = given["reward.custom_reward_function.name"]
    items: list[dict[str, Any]] = [{"name": f"{path}:{name}" if path else "math"}]
    if given.true(OVERLONG + "enable"):
        longest, buffer = given.whole("data.max_response_length"), given.whole(OVERLONG + "len")
        factor = given.number(OVERLONG + "penalty_factor")
        items.append(overlong_reward(longest, buffer, factor))
    found: Settings = {"reward.items": items}
    dapo = str(given["reward.reward_manager.name"]) == "dapo"
    return found if path else found | {
        "reward.correct": 1.0, "reward.incorrect": -1.0 if dapo else 0.0
    }  # fmt: skip


def reward_note(given: Given) -> str:
    """without a function, verl's scorer of the row's data_source; here `math`, right 1, wrong 0
    (-1 with the manager dapo)."""
    if given["reward.custom_reward_function.path"]:
        return ""
    return "verl scores by data_source with its own functions; here the reward math judges all rows"


def steps(given: Given) -> Settings:
    steps = given["trainer.total_training_steps"]
    return {"runner.steps": int(steps)} if steps else {}


def steps_note(given: Given) -> str:
    """runner.steps counts rollouts; epochs need --rows."""
    return "" if given["trainer.total_training_steps"] else EPOCHS


def folder(given: Given) -> Settings:
    folder = given["trainer.default_local_dir"]
    return {"runner.run_dir": str(folder)} if folder else {}


def resume(given: Given) -> Settings:
    mode = str(given["trainer.resume_mode"])
    if mode == "resume_path":
        return {"runner.resume": str(given["trainer.resume_from_path"])}
    return {"runner.resume": "never" if mode == "disable" else "auto"}


def lora(given: Given) -> Settings:
    model = ROOT + "model."
    return lora_settings(*(given[model + k] for k in ("lora_rank", "lora_alpha", "target_modules")))
