"""Engines of models with linear attention, whose sequences have states beside keys and values.

vLLM's CPU kernels compute them in bfloat16 alone. The engine may be as far from the model in
float32 as the gate's factors allow of what bfloat16 does to transformers' model.
"""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from reference import Reference, by_key, check_slices, make_requests, random_prompts, send, tokens
from trainers import start_sender

from rlmath.errors import WeightsError
from rlmath.model.precision import NOISE_FACTOR
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.training.checks.engine_constants import check_constants
from rlmath.training.gate import MAX_FACTOR
from rlmath.weights.fingerprint import compare_fingerprints, fingerprints
from rlmath.weights.pieces import hf_shapes
from tests.support.models import SMALL, make_for_engines

# Heads that vLLM's CPU kernels have; layers 0, 1 and 2 are linear.
SIZES = SMALL | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
# Shorter than the convolution, than a chunk of the kernel, and longer.
LENGTHS = (2, 20, 150)


class InBfloat16(Reference):
    """Weights of bfloat16, under the names of the files."""

    def __init__(self, folder):
        super().__init__(folder)
        self.is_moe = read_model_spec(folder).experts > 0

    def tensors(self):
        found = {}
        for name, one in super().tensors().items():
            stem, _, last = name.rpartition(".")
            if not stem.endswith(".experts"):
                found[name] = one.bfloat16()
                continue
            for expert, matrix in enumerate(one.bfloat16()):
                if last == "down_proj":
                    found[f"{stem}.{expert}.down_proj.weight"] = matrix.clone()
                    continue
                for which, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    found[f"{stem}.{expert}.{which}_proj.weight"] = half.clone()
        return found

    def move(self, seed):
        self.perturb(seed)
        self._model.bfloat16().float()
        return self.tensors()

    def noise(self, prompts, samples):
        """Log-probs in float32, and their differences in bfloat16."""

        def log_probs():
            return torch.cat([self.log_probs(prompts[s.problem_id], s, 1.0) for s in samples])

        exact = log_probs()
        self._model.bfloat16()
        rounded = log_probs()
        self._model.float()
        return exact, (rounded - exact).abs()


def check_log_probs(reference, prompts, samples):
    exact, noise = reference.noise(prompts, samples)
    found = (torch.tensor(np.concatenate([one.log_probs for one in samples])) - exact).abs()
    ratio = float(found.expm1().mean() / noise.expm1().mean())
    print(f"mean exp|d| - 1: {float(found.expm1().mean()):.4f}, {ratio:.2f} of bfloat16's")
    assert ratio <= NOISE_FACTOR
    # A rounding may send a token of an MoE to other experts.
    assert reference.is_moe or found.max() <= MAX_FACTOR * noise.max()


# The other family trains in tests/e2e/test_train_layouts.py.
@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5 on 2 ranks",
        pytest.param("qwen3_next on 1 ranks", marks=pytest.mark.long),
    ],
)
def engine(request, ray_session, engine_spec, tmp_path_factory):
    family, _, ranks = request.param.replace(" ranks", "").partition(" on ")
    folder = tmp_path_factory.mktemp(family)
    sizes = SIZES | (MOE if family == "qwen3_next" else {})
    made = make_for_engines(family, folder, scale=0.05, dtype=torch.bfloat16, **sizes)
    spec = replace(
        engine_spec,
        model_path=str(made),
        dtype="bfloat16",
        tensor_parallel=int(ranks),
        prefix_caching=False,
        log_dir=str(tmp_path_factory.mktemp("logs")),
    )
    reference = InBfloat16(made)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        sender = start_sender(pool, reference)
        yield pool, reference, sender
    ray.kill(sender)


def prompts_of(seed):
    return {
        f"{name} {length}": prompt
        for length in LENGTHS
        for name, prompt in random_prompts(2, length, seed).items()
    }


def test_each_weight_sync_brings_all_of_it(engine):
    pool, reference, sender = engine
    prompts = prompts_of(seed=1)
    requests = make_requests(prompts, samples=3, max_tokens=24)
    compare_fingerprints(
        fingerprints(reference.tensors().items()), pool.weights_fingerprints()[0], "at start"
    )
    check_constants(pool, read_model_spec(pool.spec.model_path))
    for seed in (1, 2, 3):
        tensors = reference.move(seed)
        ray.get(sender.set_tensors.remote(tensors))
        send(sender, pool, verify_every=1)
        samples = list(pool.generate(requests))
        check_log_probs(reference, prompts, samples)
    check_slices(pool, hf_shapes(read_model_spec(pool.spec.model_path)))
    # The engine without the last weights would be seen, by name and by log-probs.
    reference.move(seed=4)
    with pytest.raises(AssertionError):
        check_log_probs(reference, prompts, samples)
    with pytest.raises(WeightsError, match=r"linear_attn\.\w+.* differs"):
        compare_fingerprints(
            fingerprints(reference.tensors().items()), pool.weights_fingerprints()[0], "engine 0"
        )
    ray.get(sender.set_tensors.remote(reference.tensors()))
    send(sender, pool)


@pytest.mark.parametrize("key", ["A_log", "dt_bias", "conv1d.weight", "norm.weight"])
def test_one_stale_tensor_is_named(engine, key):
    pool, _, sender = engine
    send(sender, pool, verify_every=1)

    def plant(worker):
        modules = dict(worker.model_runner.get_model().named_modules())
        name, _, last = f"model.layers.1.linear_attn.{key}".rpartition(".")
        with torch.inference_mode():
            getattr(modules[name], last).data.view(-1)[-1] += 0.5

    place = pool.engines[0]
    ray.get(place.__ray_call__.remote(lambda engine: engine._loop.rpc(plant)))
    sent = ray.get(sender.weights_fingerprints.remote())
    with pytest.raises(WeightsError, match=rf"1 of .*layers\.1\.linear_attn\.{key} differs"):
        compare_fingerprints(sent, pool.weights_fingerprints()[0], "engine 0")
    send(sender, pool, verify_every=1)


def test_a_cut_sample_continues_from_a_state_that_is_computed_again(engine):
    pool, reference, _ = engine
    prompts = prompts_of(seed=2)
    requests = [
        replace(one, ignore_eos=True) for one in make_requests(prompts, samples=2, max_tokens=40)
    ]
    parts = by_key(list(pool.generate([replace(one, budget_tokens=17) for one in requests])))
    rest = list(pool.generate([replace(one, begun=parts[one.key]) for one in requests]))
    for key, whole in by_key(rest).items():
        assert tokens(whole)[:17] == tokens(parts[key]) and len(whole.token_ids) == 40
    # Another kernel reads the begun part than the one that sampled it.
    check_log_probs(reference, prompts, rest)
