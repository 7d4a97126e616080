"""An MoE's engine gets all that its workers read when each gets its share of the experts alone."""

import sys
from dataclasses import replace

import pytest
import ray
import torch
from reference import check_slices
from safetensors.torch import save_file
from shares_sender import ShareSender

from rlmath.engines.transports import TransportPlan
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.fingerprint import fingerprints
from rlmath.weights.hf_files import HfFolderReader
from rlmath.weights.pieces import expert_tensors
from tests.support.models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random MoE, whose experts' width is no multiple of 32 for a worker: vLLM pads on a CPU."""
    model = build(
        "qwen3_moe",
        dtype=torch.bfloat16,
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        moe_intermediate_size=48,
        mlp_only_layers=[],
        max_position_embeddings=1024,
    )
    made = tmp_path_factory.mktemp("moe") / "hf"
    model.save_pretrained(made)
    return made


@pytest.mark.long
def test_workers_of_an_engine_need_their_own_slices(ray_session, engine_spec, folder, tmp_path):
    spec = read_model_spec(str(folder))
    with HfFolderReader(folder, spec) as reader:
        tensors = {name: 3 * reader.read(name) for name in reader.names()}
    save_file(tensors, tmp_path / "new.safetensors")
    file, experts = str(tmp_path / "new.safetensors"), expert_tensors(spec)

    def load(worker):
        """Load the file with NaN where this worker has no share of an expert."""
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        from rlmath.engines.transports.engine_parts import expert_share
        from rlmath.engines.transports.shared_memory_engine import _pack_experts_again
        from rlmath.weights.runs import Run

        model, tensors = worker.model_runner.get_model(), load_file(file)
        share = expert_share(model)
        for name, expert in experts.items():
            whole, dim = tensors[name], 1 if "down_proj" in name else 0
            tensors[name] = torch.full_like(whole, torch.nan)
            run = Run(name, dim, 0, tuple(whole.shape))
            part = share.of(run, expert, whole.shape[dim])
            if part is not None:
                part.of(tensors[name]).copy_(part.of(whole))
        _pack_experts_again(model)
        initialize_layerwise_reload(model)
        model.load_weights(tensors.items())
        finalize_layerwise_reload(model, worker.model_config)
        return share

    wide = replace(engine_spec, model_path=str(folder), dtype="bfloat16", tensor_parallel=2)
    with RolloutPool(wide, num_engines=1, stall_timeout_s=120) as pool:
        expected = fingerprints(tensors.items())
        assert pool.weights_fingerprints()[0] != expected
        for _ in range(2):
            (shares,) = pool.call_workers(load)
            assert [(one.experts, one.part, one.parts) for one in shares] == [
                (None, 0, 2),
                (None, 1, 2),
            ]
            assert pool.weights_fingerprints()[0] == expected
        check_slices(pool, {name: tuple(t.shape) for name, t in tensors.items()})


@pytest.mark.long
def test_each_worker_gets_its_share_from_its_own_rank(ray_session, engine_spec, folder, tmp_path):
    """Over ``nccl``, with gloo in NCCL's place: two engines of two workers, two ranks with half of
    the experts each; two updates, and a third after the ranks have met the engines again."""

    def on_gloo(worker):
        from tests.contracts.gloo_wire import install

        install()

    def pack_again(worker):
        """vLLM's reload takes experts that it loads on a CPU for packed."""
        from rlmath.engines.transports.shared_memory_engine import _pack_experts_again

        _pack_experts_again(worker.model_runner.get_model())

    wide = replace(
        engine_spec, model_path=str(folder), dtype="bfloat16", tensor_parallel=2, transport="nccl"
    )
    # A worker finds the tests' packages, and not the modules of this folder.
    ray.cloudpickle.register_pickle_by_value(sys.modules[ShareSender.__module__])
    actor = ray.remote(ShareSender).options(num_cpus=0)
    rendezvous = f"file://{tmp_path / 'store'}"
    senders = [actor.remote(str(folder), rank, 2, rendezvous) for rank in range(2)]
    with RolloutPool(wide, num_engines=2, stall_timeout_s=120) as pool:
        pool.call_workers(on_gloo)
        halves = tuple(ExpertShare(None, part, 2) for part in (0, 1))
        whole = TransportPlan("nccl", tuple(pool.engines), 2, 1, "run", worker_shares=halves)
        before = pool.weights_fingerprints()[0]
        for version, factor in ((1, 3.0), (2, -0.5), (3, 2.0)):
            if version != 2:
                calls = [
                    one.connect.remote(plan)
                    for one, plan in zip(senders, whole.of_ranks(2), strict=True)
                ]
                assert ray.get(calls) == ["SharesTrainer"] * 2
            ray.get([one.set_factor.remote(factor) for one in senders])
            pool.call_workers(pack_again)
            ray.get([one.send_weights.remote(version) for one in senders])
            expected = ray.get([one.weights_fingerprints.remote() for one in senders])[0]
            assert expected != before
            assert pool.weights_fingerprints() == [expected] * 2
            before = expected
    for one in senders:
        ray.kill(one)
