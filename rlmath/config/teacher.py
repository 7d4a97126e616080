"""Settings of ``teacher``: the model whose log-probs ``algorithm.distill_coef`` learns from."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.config.model import DType
from rlmath.utils.setting import OnlyWith, setting

_ON = OnlyWith("algorithm.distill_coef", words="more than 0")
_PATH = OnlyWith("path", words="a folder")
_URL = OnlyWith("url", words="the address of a server")


@dataclass
class TeacherConfig:
    path: str | None = setting(
        None,
        "Hugging Face folder of the teacher, of the policy's vocabulary. With teacher.url the "
        "tokenizer of the model that the server has.",
        only_with=_ON,
    )
    dtype: DType | None = setting(
        None,
        "Data type of the teacher's weights and activations; null: model.dtype.",
        only_with=_PATH,
    )
    engines: int = setting(
        1,
        "Number of vLLM engines that have the teacher. On CUDA they have separate GPUs, which "
        "actor and rollout engines do not get.",
        least=1,
        only_with=_PATH,
    )
    tensor_parallel: int = setting(
        1, "Tensor-parallel size of each of the teacher's engines.", least=1, only_with=_PATH
    )
    gpu_memory_utilization: float = setting(
        0.8,
        "Fraction of GPU memory that the teacher's engines may use for weights and KV cache; the "
        "rest is for the logits of a step. CUDA only.",
        above=0,
        most=1,
        only_with=_PATH,
    )
    max_batched_tokens: int = setting(
        4096,
        "Maximum tokens per step of the teacher's engines. vLLM may hold the logits of all of them "
        "at once, in float32. CUDA only.",
        least=1,
        only_with=_PATH,
    )
    cpu_kv_cache_gib: float = setting(
        1.0,
        "KV cache size of each of the teacher's engines, in GiB. CPU only.",
        above=0,
        only_with=_PATH,
    )
    url: str | None = setting(
        None,
        "Base address of a vLLM server that has the teacher, such as http://host:8000/v1; null: "
        "the run starts engines for it.",
        only_with=_PATH,
    )
    served_model: str | None = setting(
        None,
        "Name of the teacher on the server of teacher.url; null: the only one that it has.",
        only_with=_URL,
    )
    connections: int = setting(
        32, "Sequences that the server of teacher.url scores at once.", least=1, only_with=_URL
    )
    timeout_s: float = setting(
        600.0,
        "A sequence that the server of teacher.url has not scored after this many seconds is asked "
        "for again.",
        above=0,
        only_with=_URL,
    )
    attempts: int = setting(
        10,
        "Attempts per sequence at the server of teacher.url, with pauses that double from 1 s to "
        "60 s, before this attempt of the run fails.",
        least=1,
        only_with=_URL,
    )


# Settings that a server of teacher.url decides itself.
ENGINE_SETTINGS = (
    *("dtype", "engines", "tensor_parallel", "gpu_memory_utilization", "max_batched_tokens"),
    "cpu_kv_cache_gib",
)


def starts_teacher(teacher: TeacherConfig, distill_coef: float) -> bool:
    return distill_coef > 0 and teacher.url is None
