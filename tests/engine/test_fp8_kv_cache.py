"""An engine that keeps keys and values in FP8 (``rollout.kv_cache_dtype=fp8``)."""

from dataclasses import replace

import pytest
import ray
import torch
from reference import Reference, make_requests, random_prompts, send
from trainers import start_sender
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlmath.config.rollout import KvCacheDtype
from rlmath.model.fp8 import round_cached
from rlmath.rollout.pool import RolloutPool

NAME = "kv_cache_in_fp8"

pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's attention on a CPU keeps FP8 with AVX-512 or AMX alone",
)


def attend(module, query, key, value, *rest, **named):
    return sdpa_attention_forward(
        module, query, round_cached(key), round_cached(value), *rest, **named
    )


def log_probs(reference, prompts, samples, how):
    """Log-probs of the model in float32, with this attention."""
    reference._model.set_attn_implementation(how)
    return torch.cat([reference.log_probs(prompts[s.problem_id], s, 1.0) for s in samples])


def test_log_probs_are_those_of_keys_and_values_in_fp8(ray_session, log_dir_spec, model_folder):
    """Compares prompts, samples, a kept prefix, and all of them after the second sync."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    spec = replace(log_dir_spec, kv_cache_dtype=KvCacheDtype.fp8)
    reference = Reference(model_folder)
    # Longer than a block of the cache, so that a group's later samples find the first.
    prompts = random_prompts(2, 150)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        trainer = start_sender(pool, reference)
        for seed in (1, 2):
            ray.get(trainer.set_tensors.remote(reference.perturb(seed)))
            send(trainer, pool)
            found = list(pool.generate(make_requests(prompts, samples=3)))
            engine = torch.cat([torch.tensor(one.log_probs) for one in found])
            in_fp8 = (engine - log_probs(reference, prompts, found, NAME)).abs()
            exact = (engine - log_probs(reference, prompts, found, "sdpa")).abs()
            # A value beside a boundary may be cut to the other side of it in the engine.
            assert in_fp8.mean() < 1e-3 and in_fp8.max() < 2e-2
            assert exact.mean() > 2e-2
