"""Settings of ``precision``, which actor and engines share; see ``rlmath/model/precision.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmath.model.precision import Precision
from rlmath.utils.setting import NotWith, setting

ProductDType = StrEnum("ProductDType", ["model", "float32"])


@dataclass
class PrecisionConfig:
    lm_head_dtype: ProductDType = setting(
        ProductDType(Precision.lm_head_dtype),
        "Data type of the output projection (logits) in the actor and the engines. float32 reduces "
        "the mismatch in long bfloat16 runs and doubles the memory of whole logits (actor.logits).",
    )
    router_dtype: ProductDType = setting(
        ProductDType(Precision.router_dtype),
        "Data type of the MoE router in the actor and the engines; ignored for dense models.",
    )
    batch_invariant: bool = setting(
        Precision.batch_invariant,
        "Use batch-invariant kernels in the actor and the engines and a deterministic update: "
        "log-probs do not depend on the batch, and a run is bit-reproducible on the same layout. "
        "CUDA and dense models only, and slow; an error where one side does not support it. CPU "
        "runs are reproducible anyway.",
        not_with=(
            NotWith(
                "cluster.device=cpu",
                "the kernels are CUDA's, and runs on CPU repeat anyway",
                "set it to false",
            ),
            NotWith(
                "actor.layers=local",
                "Megatron puts its batch-invariant kernels in the place of Transformer Engine's, "
                "and these layers have none",
                "set actor.layers=auto",
            ),
        ),
    )
