"""Settings of the precision that actor and engines share; see ``rlmath/precision.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ProductDType(Enum):
    model = "model"
    float32 = "float32"


@dataclass
class PrecisionConfig:
    # Type of the product that gives the logits, in the actor and in the engines: model.dtype, or
    # float32, which takes the mismatch of long bfloat16 runs down for twice the memory of logits.
    lm_head_dtype: ProductDType = ProductDType.model
    # Type of the product by which a mixture's router chooses experts, in both: model.dtype, or
    # float32; says nothing for a model without experts.
    router_dtype: ProductDType = ProductDType.float32
    # Batch-invariant kernels in the actor and in the engines, and a deterministic update: a token's
    # log-prob depends on its own sequence only, and a run repeats bit by bit on the same layout.
    # CUDA only, for dense models, and slow; where one side cannot do it, it is an error. On a CPU
    # runs repeat anyway.
    batch_invariant: bool = False
