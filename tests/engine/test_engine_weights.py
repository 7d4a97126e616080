"""New weights in running engines: they arrive whole, at any parallelism, and nothing old stays."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from reference import (
    VOCABULARY,
    Actor,
    Reference,
    by_key,
    check_slices,
    make_requests,
    random_prompts,
    send,
    tokens,
)
from trainers import start_sender, start_senders

from rlmath.engines.engine import RolloutEngine
from rlmath.engines.transports.segments import NamedSegments
from rlmath.errors import UserError, WeightsError
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.weight_sync import Verification, sync_weights
from rlmath.weights.fingerprint import compare_fingerprints
from rlmath.weights.pieces import hf_shapes
from rlmath.weights.slices import Rotation, fingerprint_in

# Two whole blocks of the prefix cache and a bit: a CPU engine's blocks hold 128 tokens.
LONG_PROMPT_TOKENS = 300


def test_an_update_gives_the_samples_of_the_new_weights_and_forgets_the_old_prefixes(
    pool, sender, reference
):
    prompts = random_prompts(2, LONG_PROMPT_TOKENS, seed=10)
    requests = make_requests(prompts, samples=4)
    before = by_key(list(pool.generate(requests)))
    assert reference.largest_difference(prompts, list(before.values()), 1.0) < 1e-4
    ray.get(sender.set_tensors.remote(reference.perturb(seed=1)))
    version = send(sender, pool)

    after = by_key(list(pool.generate(requests)))
    assert {sample.weights_version for sample in after.values()} == {version}
    assert all(tokens(after[key]) != tokens(before[key]) for key in after)
    assert reference.largest_difference(prompts, list(after.values()), 1.0) < 1e-4
    # The check can fail: the old samples' log-probabilities are not the new model's.
    assert reference.largest_difference(prompts, list(before.values()), 1.0) > 0.05


def test_the_same_weights_again_give_the_same_samples(pool, sender):
    requests = make_requests(random_prompts(4, 20, seed=11), samples=4)
    send(sender, pool)
    before = by_key(list(pool.generate(requests)))
    send(sender, pool)
    after = by_key(list(pool.generate(requests)))
    assert all(tokens(after[key]) == tokens(before[key]) for key in after)
    assert all(np.array_equal(after[key].log_probs, before[key].log_probs) for key in after)


def test_a_flipped_bit_is_found_by_name(pool, sender):
    """In a tensor that can be read, in a packed matrix, and in the packed copy of one."""
    send(sender, pool, verify_every=1)
    check_slices(pool, shapes_of(pool))
    sent = ray.get(sender.weights_fingerprints.remote())
    assert all(held == sent for held in pool.weights_fingerprints())

    def flip(worker):
        from rlmath.engines.transports.cpu_load import _pack
        from rlmath.engines.transports.packed import columns_of

        modules = dict(worker.model_runner.get_model().named_modules())
        bias = modules["model.layers.1.self_attn.qkv_proj"].bias
        bias.data.view(torch.int32)[-1] ^= 1 << 25
        down = modules["model.layers.0.mlp.down_proj"]
        width = down.input_size_per_partition
        matrix = torch.cat([one for _, one in columns_of(down, width, torch.float32)], 1)
        matrix = matrix.clone(memory_format=torch.contiguous_format)
        matrix.view(torch.int32)[3, 7] ^= 1
        _pack(down, "weight", [matrix])
        head = modules["lm_head"]
        kept = head.weight.data.clone()
        head.weight.data.view(torch.int32)[5, 2] ^= 1
        head.quant_method.process_weights_after_loading(head)
        head.weight.data.copy_(kept)

    ray.get(pool.engines[1].__ray_call__.remote(lambda engine: engine._loop.rpc(flip)))
    first, second = pool.weights_fingerprints()
    compare_fingerprints(sent, first, "engine 0")
    with pytest.raises(WeightsError, match=r"engine 1 holds other weights .* 3 of") as error:
        compare_fingerprints(sent, second, "engine 1")
    assert "model.layers.1.self_attn.v_proj.bias differs" in str(error.value)
    assert "model.layers.0.mlp.down_proj.weight differs" in str(error.value)
    assert "lm_head.weight differs" in str(error.value)
    # In slices too, each of them in one.
    rotation, named = Rotation(shapes_of(pool), packed=True), set()
    while not named or not rotation.is_at_start:
        part, _ = rotation.pop(0.0)
        sent = ray.get(sender.weights_fingerprints.remote(part))
        first, second = pool.weights_fingerprints(part)
        assert first == sent
        named |= {(name, part[name]) for name in sent if second[name] != sent[name]}
    assert named == {
        ("model.layers.1.self_attn.v_proj.bias", None),
        ("model.layers.0.mlp.down_proj.weight", ((0, 16),)),
        ("lm_head.weight", ((0, 16),)),
    }
    # The next update brings all of it right again.
    send(sender, pool, verify_every=1)


@pytest.mark.parametrize("stale_from", [2, 3, 4])
def test_an_engine_that_stays_at_an_older_version_is_found(pool, sender, reference, stale_from):
    """The first weights arrive, and from some version on the engines get the same ones again.

    The fourth sync compares a slice: all weights take more than 0.5 % of such a short step.
    """
    pool.verified_syncs = 0  # As if the engines had just started.
    verification = Verification(None, Rotation(shapes_of(pool), packed=True))
    where = "in the slice that was compared" if stale_from == 4 else "weights version"
    for version in (1, 2, 3, 4):
        tensors = reference.perturb(seed=version)
        if version < stale_from:
            ray.get(sender.set_tensors.remote(tensors))
        actor = Actor([sender])
        actor.weights_fingerprints = functools.partial(fingerprints_of, tensors)
        if version == stale_from:
            with pytest.raises(WeightsError, match=f"engine 0, .*{where}.* holds other weights"):
                sync_weights(actor, pool, pool.weights_version + 1, verification)
            break
        sync_weights(actor, pool, pool.weights_version + 1, verification)
    ray.get(sender.set_tensors.remote(reference.tensors()))
    send(sender, pool)


def test_layers_travel_in_several_buckets(sender):
    assert ray.get(sender.num_buckets.remote()) > 6


def test_a_version_has_to_be_new(pool, sender):
    with pytest.raises(ValueError, match="is not after"):
        sync_weights(sender, pool, pool.weights_version)


@pytest.mark.long
def test_two_ranks_of_one_engine_get_their_shards_and_leave_nothing(
    ray_session, engine_spec, model_folder, tmp_path
):
    """Two ranks are synced in test_linear_attention_engines.py and test_quantized_engine.py too."""
    reference = Reference(model_folder)
    prompts = random_prompts(4, 20, seed=12)
    spec = replace(engine_spec, tensor_parallel=2, log_dir=str(tmp_path))
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        place = pool.processes[0].place()
        engine = psutil.Process(place.pid)
        tree = [engine, *engine.children(recursive=True)]
        assert len(tree) >= 3, "the actor and its two workers"
        sender = start_sender(pool, reference)
        for seed in (1, 2):
            ray.get(sender.set_tensors.remote(reference.perturb(seed)))
            # Fused and shared tensors add up to the whole ones.
            send(sender, pool, verify_every=1)
            check_slices(pool, shapes_of(pool))
            samples = list(pool.generate(make_requests(prompts, samples=3, temperature=2.0)))
            assert reference.largest_difference(prompts, samples, 2.0) < 1e-4
            assert max(token for s in samples for token in s.token_ids) < VOCABULARY
        assert len(pool.ask(RolloutEngine.parameter_sums)[0]) == 2
        mapped = set().union(*map(_shared_memory_of, tree))
        assert mapped
    ray.kill(sender)
    _, alive = psutil.wait_procs(tree, timeout=15)
    assert not alive
    assert not [name for name in mapped if Path(name).exists()]


def test_a_missing_tensor_is_named_and_the_engine_samples_no_more(
    ray_session, log_dir_spec, reference
):
    incomplete = _Without(reference, "model.layers.2.mlp.down_proj.weight")
    with RolloutPool(log_dir_spec, num_engines=1, stall_timeout_s=120) as pool:
        sender = start_sender(pool, incomplete)
        with pytest.raises(WeightsError, match=r"engine 0: .*layers\.2\.mlp\.down_proj\.weight"):
            send(sender, pool)
        with pytest.raises(Exception, match="no valid weights"):
            list(pool.generate(make_requests(random_prompts(1, 10), samples=1)))
    ray.kill(sender)


def test_a_trainer_that_is_killed_leaves_no_shared_memory_and_another_may_follow(
    pool, reference, tmp_path
):
    prompts = random_prompts(2, 20, seed=13)
    senders = start_senders(pool, reference, 2, f"file://{tmp_path}/rendezvous")
    tensors = reference.perturb(seed=3)
    ray.get([sender.set_tensors.remote(tensors) for sender in senders])
    send(senders, pool)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("rlmath_engine-tests")]
    samples = list(pool.generate(make_requests(prompts, samples=4)))
    assert reference.largest_difference(prompts, samples, 1.0) < 1e-4
    for sender in senders:
        ray.kill(sender)

    sender = start_sender(pool, reference)
    send(sender, pool)
    samples = list(pool.generate(make_requests(prompts, samples=4)))
    assert reference.largest_difference(prompts, samples, 1.0) < 1e-4
    ray.kill(sender)


def test_the_entry_point_acts_only_in_processes_of_our_engines(engine_spec):
    """First as any other project's vLLM process in this environment, then with our variables."""
    program = f"""
import os
from vllm import plugins
from torch.distributed import ProcessGroupGloo
from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Engines
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

def owners():
    changed = TopKTopPSampler.forward_cpu, Sampler.gather_logprobs, ProcessGroupGloo.__init__
    return [str(getattr(one, "__module__", None)).split(".")[0] for one in changed]

plugins.load_general_plugins()
assert "shared_memory" not in Engines._registry
assert "rlmath" not in owners(), owners()
os.environ.update({engine_spec.environment()!r})
plugins.plugins_loaded = False
plugins.load_general_plugins()
assert owners() == ["rlmath"] * 3, owners()
print(Engines._registry["shared_memory"]().__name__)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split()[-1:] == ["SharedMemoryEngine"], ran.stderr


def test_the_trainers_end_does_not_import_vllm():
    program = """
import sys
import rlmath.engines.transports, rlmath.engines.transports.shared_memory
print([name for name in sys.modules if name.split(".")[0] in ("vllm", "ray", "megatron")])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_too_little_shared_memory_error_has_the_figures():
    with pytest.raises(UserError, match=r"= 2000000000\.0 MiB .*weights\.bucket_size_mib"):
        NamedSegments("run", [10**9 * 2**20] * 2)


def fingerprints_of(tensors, part=None):
    return {
        name: fingerprint_in(part, name, tensor, 0, 0)
        for name, tensor in tensors.items()
        if part is None or name in part
    }


def shapes_of(pool):
    return hf_shapes(read_model_spec(pool.spec.model_path))


class _Without:
    def __init__(self, reference, name):
        self._tensors = {k: v for k, v in reference.tensors().items() if k != name}

    def tensors(self):
        return self._tensors


def _shared_memory_of(process):
    """Files in /dev/shm that a process has mapped, whether they still have their names or not."""
    paths = {one.path for one in process.memory_maps() if one.path.startswith("/dev/shm/")}
    return {path.removesuffix(" (deleted)") for path in paths}
