"""An engine that quantizes to FP8 what a weight sync brings (``rollout.quantization=fp8``)."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
import ray
import torch
from reference import Reference, check_slices, make_requests, random_prompts, send
from trainers import start_sender

from rlmath.checks.quantization import QUANTIZED_FAMILIES
from rlmath.config.rollout import Quantization
from rlmath.errors import WeightsError
from rlmath.model.fp8 import round_values
from rlmath.model.precision import NOISE_FACTOR
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.training.gate import MAX_FACTOR
from rlmath.weights.fingerprint import compare_fingerprints
from rlmath.weights.pieces import hf_shapes
from rlmath.weights.quantized_prints import is_quantized, quantized_fingerprints
from tests.support.models import SMALL, make_for_engines


def move_weights(reference, seed):
    """Other weights, of bfloat16, which the reference takes as well."""
    tensors = {name: one.bfloat16() for name, one in reference.perturb(seed).items()}
    reference.load({name: one.float() for name, one in tensors.items()})
    return tensors


class InBfloat16:
    """Module that a sender starts with."""

    def __init__(self, reference):
        self._reference = reference

    def tensors(self):
        return {name: one.bfloat16() for name, one in self._reference.tensors().items()}


class InFp8(torch.nn.Linear):
    """Layer that multiplies as the engine does."""

    def forward(self, x):
        return torch.nn.functional.linear(round_values(x), round_values(self.weight), self.bias)


def check_against_fp8(reference, prompts, samples):
    """The engine is as far from the model in float32 as products in FP8 are, by the gate's factors:
    it computes in FP8, and nothing else differs."""

    def log_probs():
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
    assert ratios[1] / 2 <= ratios[0] <= NOISE_FACTOR * ratios[1]
    assert found.max() <= MAX_FACTOR * noise.max()


@pytest.fixture(scope="module")
def wide(ray_session, engine_spec, tmp_path_factory):
    spec = replace(
        engine_spec,
        dtype="bfloat16",
        quantization=Quantization.fp8,
        tensor_parallel=2,
        log_dir=str(tmp_path_factory.mktemp("wide")),
    )
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        yield pool


def test_engines_hold_and_compute_what_the_second_sync_brought_too(wide, model_folder):
    reference = Reference(model_folder)
    prompts = random_prompts(4, 20)
    requests = make_requests(prompts, samples=2)
    names = [name for name in reference.tensors() if is_quantized(name)]
    trainer = start_sender(wide, InBfloat16(reference))
    folder = InBfloat16(reference).tensors()
    (held,) = wide.weights_fingerprints()
    compare_fingerprints(quantized_fingerprints(folder.items()), held, "at start")
    before = {}
    for seed in (1, 2):
        tensors = move_weights(reference, seed)
        ray.get(trainer.set_tensors.remote(tensors))
        send(trainer, wide)
        wanted = quantized_fingerprints(tensors.items())
        (held,) = wide.weights_fingerprints()
        assert held == wanted and all(f"{name}_scale" in held for name in names)
        if before:
            with pytest.raises(WeightsError, match="differs"):
                compare_fingerprints(before, held, "engine 0")
        before = wanted
        found = list(wide.generate(requests))
        check_against_fp8(reference, prompts, found)


def test_a_stopped_worker_ends_with_its_engine(wide):
    """As one that waits in a kernel: it does not read of its engine's end, and on a GPU it would
    keep the memory that the next engine needs. The last test that has this engine."""

    def signal_at_the_parents_death(_):
        import ctypes

        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        return number.value

    # Ray may end an actor's children as well, but not when its node's process is gone.
    assert wide.call_workers(signal_at_the_parents_death) == [[signal.SIGKILL] * 2]
    place = wide.processes[0].place()
    workers = psutil.Process(place.pid).children(recursive=True)
    ranks = [one for one in workers if "resource_tracker" not in " ".join(one.cmdline())]
    assert len(ranks) >= 2
    for one in ranks:
        one.suspend()
    os.kill(place.pid, signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


@pytest.mark.long
@pytest.mark.parametrize("family", QUANTIZED_FAMILIES)
def test_an_engine_quantizes_each_sync_of(ray_session, log_dir_spec, tmp_path, family):
    folder = make_for_engines(family, tmp_path / "model", **SMALL)
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
        trainer = start_sender(pool, InBfloat16(reference))
        for seed in (1, 2):
            tensors = move_weights(reference, seed)
            ray.get(trainer.set_tensors.remote(tensors))
            send(trainer, pool)
            wanted, (held,) = quantized_fingerprints(tensors.items()), pool.weights_fingerprints()
            check_slices(pool, hf_shapes(read_model_spec(folder)), packed=False)
            # Qwen3's output layer is its embedding here.
            assert set(wanted) - set(held) <= {"lm_head.weight"}
            assert held == {name: wanted[name] for name in held}
            found = list(pool.generate(make_requests(prompts, samples=2)))
            check_against_fp8(reference, prompts, found)
