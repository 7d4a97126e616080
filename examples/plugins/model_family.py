"""A model family: an architecture of yours that is a Qwen2 by another name.

rlmath train experiment=quickstart plugins='[examples/plugins/model_family.py]'
"""

from __future__ import annotations

import dataclasses

from rlmath.model.families import FAMILY_PLUGINS, Family, family_of


@FAMILY_PLUGINS.register("renamed_qwen2")
def renamed_qwen2() -> Family:
    """A table of tensors like those of ``rlmath/model/families.py``; here it is one of them."""
    return dataclasses.replace(
        family_of("Qwen2ForCausalLM"),
        name="renamed_qwen2",
        # As ``architectures`` in the model's config.json.
        architectures=("MyQwen2ForCausalLM",),
        vllm="vllm.model_executor.models.qwen2:Qwen2ForCausalLM",
    )
