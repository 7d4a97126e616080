import dataclasses

import pytest
from config_cases import QWEN_1_5B, set_values

from rlmath.checks.pairs import pair_problems
from rlmath.checks.quantization import (
    QUANTIZED_FAMILIES,
    cpu_kv_cache_in_fp8,
    quantization_model,
    quantization_problems,
)
from rlmath.config.algorithm import OldLogProbs
from rlmath.config.lora import LoraRollout
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Config, Device, DType
from rlmath.model.families import FAMILIES
from rlmath.model.spec import model_spec

QWEN = model_spec(QWEN_1_5B)


def problems(made, command):
    return [*pair_problems(made, Device.cuda, command), *quantization_problems(made, command)]


def config():
    made = Config()
    made.rollout.quantization = Quantization.fp8
    made.algorithm.correction.kind = "token_truncate"
    return made


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"algorithm.correction.kind": "none"}, "token_truncate"),
        (
            {"algorithm.correction.kind": "none", "algorithm.old_log_probs": OldLogProbs.engine},
            "use token_truncate with algorithm.old_log_probs=recompute",
        ),
        ({"model.dtype": DType.float32}, "use bfloat16"),
        ({"precision.batch_invariant": True}, "batch_invariant"),
        ({"actor.lora.rank": 4, "actor.lora.rollout": LoraRollout.unmerged}, "unmerged"),
    ],
    ids=str,
)
def test_fp8_engine_refuses_incompatible_settings(changes, part):
    made = config()
    assert not list(problems(made, "train"))
    set_values(made, changes)
    (message,) = problems(made, "train")
    assert "rollout.quantization=fp8" in message and part in message
    made.rollout.quantization = Quantization.none
    assert not list(problems(made, "train"))


def test_an_evaluation_needs_no_correction():
    made = config()
    made.algorithm.correction.kind = "none"
    assert not list(problems(made, "evaluate"))


def test_families_that_were_not_compared_are_refused():
    for family in FAMILIES:
        model = dataclasses.replace(QWEN, architecture=family.architectures[0])
        found = list(quantization_model(config(), model))
        assert bool(found) == (family.name not in QUANTIZED_FAMILIES)
        assert not list(quantization_model(Config(), model))


def in_cache():
    made = Config()
    made.rollout.kv_cache_dtype = KvCacheDtype.fp8
    made.algorithm.correction.kind = "token_truncate"
    return made


def test_fp8_kv_cache_refuses_incompatible_settings():
    assert not list(problems(in_cache(), "train"))
    uncorrected, float32, invariant = in_cache(), in_cache(), in_cache()
    uncorrected.algorithm.correction.kind = "none"
    float32.model.dtype = DType.float32
    invariant.precision.batch_invariant = True
    for made, part in (
        (uncorrected, "with rollout.kv_cache_dtype=fp8; use token_truncate"),
        (float32, "use bfloat16"),
        (invariant, "batch_invariant"),
    ):
        (message,) = problems(made, "train")
        assert part in message
    # Engines alone correct nothing.
    assert not list(problems(uncorrected, "evaluate"))
    # Both at once: each is said.
    both = in_cache()
    both.rollout.quantization = Quantization.fp8
    both.algorithm.correction.kind = "none"
    assert len(list(problems(both, "train"))) == 2


def test_any_family_but_those_with_latent_vectors_can_have_a_cache_in_fp8():
    assert not list(quantization_model(in_cache(), QWEN))
    latent = dataclasses.replace(QWEN, latent=object())
    (message,) = quantization_model(in_cache(), latent)
    assert "latent" in message


def test_a_cpu_without_the_instructions_or_with_narrow_heads(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert not list(cpu_kv_cache_in_fp8(in_cache(), QWEN))
    narrow = dataclasses.replace(QWEN, head_dim=80)
    (message,) = cpu_kv_cache_in_fp8(in_cache(), narrow)
    assert "multiples of 32" in message
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    (message,) = cpu_kv_cache_in_fp8(in_cache(), QWEN)
    assert "AVX-512" in message
    assert not list(cpu_kv_cache_in_fp8(Config(), QWEN))
