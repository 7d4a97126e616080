import dataclasses

import pytest

from rlmath.checks.latent import latent_problems
from rlmath.checks.layout import cpu_cache_problem, cpu_heads_problem, tensor_parallel_problems
from rlmath.config.schema import Device
from rlmath.model.published import KNOWN
from rlmath.model.spec import Latent, model_spec

SPEC = model_spec(KNOWN["DeepSeek-V3"])


def problems(spec, device, command):
    return list(latent_problems(spec, device, command))


def test_only_what_is_proven():
    assert problems(SPEC, Device.cpu, "train") == []
    (problem,) = problems(SPEC, Device.cuda, "train")
    assert "cluster.device=cpu" in problem
    assert problems(SPEC, Device.cuda, "evaluate") == []
    narrow = dataclasses.replace(SPEC, latent=Latent(16, 24, 12, 8, 6))
    (problem,) = problems(narrow, Device.cpu, "train")
    assert "24 + qk_rope_head_dim=8 = 32" in problem and "supports only 576" in problem
    llama = model_spec(KNOWN["Llama-3.1-8B"])
    assert problems(llama, Device.cuda, "train") == []


def test_tensor_ranks_share_the_latent_vectors():
    assert list(tensor_parallel_problems("actor", 8, SPEC, 0)) == []
    odd = dataclasses.replace(SPEC, latent=dataclasses.replace(SPEC.latent, query_rank=1535))
    (problem,) = tensor_parallel_problems("actor", 2, odd, 0)
    assert "q_lora_rank 1535 / 2 leaves 1" in problem
    # An engine's workers have them whole.
    assert list(tensor_parallel_problems("rollout", 2, odd, 0)) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_keeps_one_vector_for_each_token(ranks):
    assert list(cpu_heads_problem("model.path", SPEC)) == []
    blocks = 2 * 128
    needed = 61 * 576 * 4 * blocks / 2**30
    enough = list(cpu_cache_problem("key", needed + 1e-6, SPEC, 200, ranks, 4))
    assert enough == []
    (problem,) = cpu_cache_problem("key", 0.9 * needed, SPEC, 200, ranks, 4)
    assert "1 heads x 576 x 4 bytes" in problem
