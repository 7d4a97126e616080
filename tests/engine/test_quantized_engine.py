"""An engine that quantizes to FP8 what a weight sync brings (``rollout.quantization=fp8``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from reference import Reference, check_slices, make_requests, random_prompts, send
from test_unmerged_families import make_folder
from trainers import start_sender

from rlmath.checks.quantization import QUANTIZED_FAMILIES
from rlmath.config.rollout import Quantization
from rlmath.errors import WeightsError
from rlmath.model.fp8 import rounded
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import EngineSpec
from rlmath.training.gate import MAX_FACTOR, MEAN_FACTOR
from rlmath.types import Sample
from rlmath.weights.fingerprint import compare_fingerprints
from rlmath.weights.pieces import hf_shapes
from rlmath.weights.quantized_prints import is_quantized, quantized_fingerprints


def moved(reference: Reference, seed: int) -> dict[str, torch.Tensor]:
    """Other weights, of bfloat16, which the reference takes as well."""
    tensors = {name: one.bfloat16() for name, one in reference.perturb(seed).items()}
    reference.load({name: one.float() for name, one in tensors.items()})
    return tensors


class InBfloat16:
    """What a sender begins with."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: one.bfloat16() for name, one in self._reference.tensors().items()}


class InFp8(torch.nn.Linear):
    """As the engine multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x), rounded(self.weight), self.bias)


def check_against_fp8(
    reference: Reference, prompts: dict[str, tuple[int, ...]], samples: Sequence[Sample]
) -> None:
    """The engine is as far from the model in float32 as products in FP8 are, by the gate's factors:
    it computes in FP8, and nothing else differs."""

    def log_probs() -> torch.Tensor:
        return torch.cat([reference.log_probs(prompts[s.problem_id], s, 1.0) for s in samples])

    exact = log_probs()
    reference.use(InFp8)
    in_fp8 = log_probs()
    reference.use(torch.nn.Linear)
    engine = torch.cat([torch.tensor(one.log_probs) for one in samples])
    noise, found = (in_fp8 - exact).abs(), (engine - exact).abs()
    ratios = [float((one.exp() - 1).mean()) for one in (found, noise)]
    print(
        f"mean exp|d| - 1: engine {ratios[0]:.4f}, FP8 {ratios[1]:.4f}; largest "
        f"{float(found.max()):.3f}, {float(noise.max()):.3f} nats"
    )
    assert ratios[1] / 2 <= ratios[0] <= MEAN_FACTOR * ratios[1]
    assert found.max() <= MAX_FACTOR * noise.max()


def test_engines_hold_and_compute_what_the_second_sync_brought_too(
    ray_session: None, log_dir_spec: EngineSpec, model_folder: Path
) -> None:
    spec = replace(log_dir_spec, dtype="bfloat16", quantization=Quantization.fp8, tensor_parallel=2)
    reference = Reference(model_folder)
    prompts = random_prompts(4, 20)
    requests = make_requests(prompts, samples=2)
    names = [name for name in reference.tensors() if is_quantized(name)]
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        trainer = start_sender(pool, InBfloat16(reference))  # type: ignore[arg-type]
        folder = InBfloat16(reference).tensors()
        (held,) = pool.weights_fingerprints()
        compare_fingerprints(quantized_fingerprints(folder.items()), held, "at start")
        before: dict[str, Any] = {}
        for seed in (1, 2):
            tensors = moved(reference, seed)
            ray.get(trainer.set_tensors.remote(tensors))
            send(trainer, pool)
            wanted = quantized_fingerprints(tensors.items())
            (held,) = pool.weights_fingerprints()
            assert held == wanted and all(f"{name}_scale" in held for name in names)
            if before:
                with pytest.raises(WeightsError, match="differs"):
                    compare_fingerprints(before, held, "engine 0")
            before = wanted
            found = list(pool.generate(requests))
            check_against_fp8(reference, prompts, found)


@pytest.mark.long
@pytest.mark.parametrize("family", QUANTIZED_FAMILIES)
def test_an_engine_quantizes_each_sync_of(
    ray_session: None, log_dir_spec: EngineSpec, tmp_path: Path, family: str
) -> None:
    folder = make_folder(family, tmp_path / "model")
    reference = Reference(folder)
    spec = replace(
        log_dir_spec,
        model_path=str(folder),
        dtype="bfloat16",
        max_sequence_tokens=128,
        quantization=Quantization.fp8,
    )
    prompts = random_prompts(2, 20)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        trainer = start_sender(pool, InBfloat16(reference))  # type: ignore[arg-type]
        for seed in (1, 2):
            tensors = moved(reference, seed)
            ray.get(trainer.set_tensors.remote(tensors))
            send(trainer, pool)
            wanted, (held,) = quantized_fingerprints(tensors.items()), pool.weights_fingerprints()
            check_slices(pool, hf_shapes(read_model_spec(folder)), packed=False)
            # Qwen3's output layer is its embedding here.
            assert set(wanted) - set(held) <= {"lm_head.weight"}
            assert held == {name: wanted[name] for name in held}
            found = list(pool.generate(make_requests(prompts, samples=2)))
            check_against_fp8(reference, prompts, found)
