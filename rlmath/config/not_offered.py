"""Levers of Megatron-core 0.16.1 and vLLM 0.32 that there is no setting or value for, and why.

``tests/contracts/test_not_offered.py`` holds each reason to the installed package: when one no
longer holds, the lever can be offered.
"""

from __future__ import annotations

_PRECISION = (
    "Megatron allows it only with Transformer Engine's FusedAdam, which nothing here can run to "
    "compare; actor.offload and actor.offload_in_backward take the moments off the GPU"
)
_MOMENTS = (
    "Megatron allows it only with Transformer Engine's FusedAdam, which nothing here can run to "
    "compare. Rounded to the nearest bfloat16, a second moment with adam_beta2=0.999 does not "
    "follow gradients that become smaller: one step changes it by less than half the distance to "
    "the next number. It would need rounding at random, which neither Megatron nor torch has; "
    "actor.offload and actor.offload_in_backward take the moments off the GPU"
)
_ACTIVATIONS = (
    "Megatron asks Transformer Engine for it, which nothing here can run to compare; "
    "actor.recompute=selective saves activations"
)
_FP8_WEIGHTS = (
    "weight sync, checkpoints, fingerprints and export read weights in model.dtype; actor.fp8 "
    "multiplies copies of them in FP8"
)
_DELAYED = (
    "its scales are of earlier micro-batches: the same tokens under the same weights have other "
    "log-probs after each pass, so that a first minibatch's ratio is not 1 and a resumed run is "
    "another one (checkpoints keep no amax history). Use blockwise"
)

NOT_OFFERED = {
    "optimizer_cpu_offload": (
        "Megatron's HybridDeviceOptimizer fails where all is on one device, as on a CPU, so that "
        "nothing here can prove it; actor.offload_in_backward keeps the optimizer's state on "
        "the GPU only for its steps"
    ),
    **dict.fromkeys(
        (
            "use_precision_aware_optimizer",
            "main_grads_dtype",
            "main_params_dtype",
        ),
        _PRECISION,
    ),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "moments_dtype"), _MOMENTS),
    "overlap_grad_reduce": "it is actor.overlap_gradients here",
    "align_param_gather": (
        "with actor.overlap_param_gather every stage begins its gathers at the end of the "
        "optimizer step, all at once"
    ),
    "overlap_param_gather_with_optimizer_step": (
        "Megatron has it only for stages with several chunks, each with its own optimizer; "
        "actor.overlap_param_gather begins at the end of the step"
    ),
    "gradient_accumulation_fusion": (
        "Transformer Engine's layers always have it; Megatron's own need APEX for it"
    ),
    "fine_grained_activation_offloading": _ACTIVATIONS,
    "offload_modules": _ACTIVATIONS,
    "cpu_offloading": _ACTIVATIONS,
    "fp8_param": _FP8_WEIGHTS,
}

# By key, values that one might ask for.
NOT_OFFERED_VALUES = {
    "actor.fp8_recipe": {
        "delayed": _DELAYED,
        "custom": (
            "Megatron takes a Python path to quantizers, which nothing here can run to compare; "
            "use blockwise"
        ),
    },
    "rollout.quantization": {
        "int8": (
            "vLLM quantizes only experts to INT8 when it has loaded them, with kernels that need "
            "a GPU; dense matrices have to be in INT8 in the model's files, which no weight sync "
            "brings. Use fp8, or none"
        )
    },
}
