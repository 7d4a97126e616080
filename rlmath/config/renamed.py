"""Settings that have another key now: old keys are errors that name the new one."""

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
    "algorithm.pass_at_k": "algorithm.advantage_options.k",
}
