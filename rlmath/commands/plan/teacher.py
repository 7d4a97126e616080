"""Memory of a teacher's engines on their GPUs."""

from __future__ import annotations

from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.gpus import GPUS, Gpu
from rlmath.commands.plan.memory import GIB
from rlmath.config.arithmetic import teacher_sequence_tokens
from rlmath.config.schema import Config, DType
from rlmath.config.teacher import starts_teacher
from rlmath.errors import ModelError
from rlmath.model.spec import ModelSpec, read_model_spec


def describe_teacher(config: Config) -> list[str]:
    """Its terms on each of its GPUs, and which cards hold them; nothing without a teacher."""
    teacher = config.teacher
    if not starts_teacher(teacher, config.algorithm.distill_coef) or teacher.path is None:
        return []
    try:
        spec = read_model_spec(teacher.path)
    except ModelError:
        return []  # The checks report it.
    terms = teacher_bytes(config, spec)
    found = ", ".join(f"{name} {size / GIB:.1f}" for name, size in terms.items())
    fitting = [gpu.name for gpu in GPUS.values() if teacher_fits(config, terms, gpu)]
    return [
        f"         GiB on each of the teacher's GPUs: {found}; of "
        f"teacher.gpu_memory_utilization={teacher.gpu_memory_utilization:g} all but the logits; "
        f"fits {', '.join(fitting) or 'no known GPU'}"
    ]


def teacher_bytes(config: Config, spec: ModelSpec) -> dict[str, float]:
    """Terms of one rank of an engine.

    vLLM computes the log-probs of a step's prompt tokens from whole logits, in the model's type, in
    float32 and as log-probs (``_get_prompt_logprobs_dict`` in ``gpu_model_runner.py``), all ranks
    alike; it ignores them when it sizes its KV cache.
    """
    teacher = config.teacher
    value = 4 if (teacher.dtype or config.model.dtype) is DType.float32 else 2
    tp, tokens = teacher.tensor_parallel, teacher_sequence_tokens(config)
    rows = min(teacher.max_batched_tokens, tokens * config.rollout.max_running_sequences)
    return {
        "weights": engine_weights_bytes(spec, tp) * value / 2,
        "cache of one sequence": tokens * kv_bytes(spec, tp, sequence_tokens=tokens) * value / 2,
        "logits": rows * spec.vocab * (value + 4 + 4),
    }


def teacher_fits(config: Config, terms: dict[str, float], gpu: Gpu) -> bool:
    """Whether weights and one sequence are within vLLM's share of a card, and the logits in the
    rest."""
    share = config.teacher.gpu_memory_utilization * gpu.memory_gib * GIB
    beside = gpu.memory_gib * GIB - share
    return terms["weights"] + terms["cache of one sequence"] <= share and terms["logits"] <= beside
