"""Settings and values with another name now: an old one is an error that names the new one."""

from __future__ import annotations

RENAMED = {
    "algorithm.clip_low": "algorithm.loss_options.clip_low",
    "algorithm.clip_high": "algorithm.loss_options.clip_high",
    "algorithm.dual_clip": "algorithm.loss_options.dual_clip",
    "algorithm.sapo_tau_positive": "algorithm.loss_options.tau_positive",
    "algorithm.sapo_tau_negative": "algorithm.loss_options.tau_negative",
    "algorithm.dppo_divergence": "algorithm.loss_options.divergence",
    "algorithm.dppo_threshold": "algorithm.loss_options.threshold",
    "algorithm.leave_one_out": "algorithm.advantage_options.leave_one_out",
    "algorithm.leave_one_out_std": "algorithm.advantage_options.leave_one_out_std",
    "algorithm.advantage_epsilon": "algorithm.advantage_options.epsilon",
    "algorithm.curriculum.rest": "algorithm.curriculum.cooldown",
    "algorithm.curriculum.rest_steps": "algorithm.curriculum.cooldown_steps",
    "algorithm.pass_at_k": "algorithm.advantage_options.k",
}

# By key: old values and new ones.
RENAMED_VALUES = {"algorithm.truncated": {"penalise": "penalize"}}
