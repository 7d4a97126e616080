"""Seconds of a weight sync on paper: which terms there are, and what ``auto`` takes."""

import json

import pytest

from rlmath.cli import main
from rlmath.commands.plan.gpus import GPUS, Efficiency
from rlmath.commands.plan.models import KNOWN, model_spec
from rlmath.commands.plan.weight_sync import CALL_S, sync_time
from rlmath.config.weights import WeightsConfig, bucket_mib
from rlmath.engines.transport import choose_transport
from rlmath.model.parallel import Layout

SPEC = model_spec(KNOWN["DeepSeek-R1-Distill-Qwen-7B"])
BYTES = 2 * SPEC.num_parameters


def predict_sync(actor, *, colocated, spec=SPEC, buckets=30, engine_tp=2, gpus_per_node=8):
    found = sync_time(
        spec,
        actor,
        weights_bytes=2 * spec.num_parameters,
        buckets=buckets,
        engine_tp=engine_tp,
        colocated=colocated,
        gpu=GPUS["h100"],
        efficiency=Efficiency(),
        gpus_per_node=gpus_per_node,
    )
    assert found.transport == choose_transport("auto", device="cuda", colocated=colocated)
    return found


def test_gathering_is_over_links_within_a_node_and_over_the_network_between():
    on_node = predict_sync(Layout(4, 2), colocated=True)
    assert on_node.gather_s == pytest.approx(7 / 8 * BYTES / (450e9 * 0.7))
    apart = predict_sync(Layout(4, 2), colocated=True, gpus_per_node=4)
    assert apart.gather_s == pytest.approx(on_node.gather_s * 450 / 50)
    assert apart.calls_s == on_node.calls_s == 30 * CALL_S
    # A rank that has the whole model gathers nothing.
    assert predict_sync(Layout(), colocated=True).gather_s == 0


def test_engines_apart_get_all_bytes():
    assert predict_sync(Layout(4), colocated=False).send_s > BYTES / (50e9 * 0.7)


def test_a_7b_on_128_gpus_takes_a_second_and_a_half_at_most_on_paper():
    for colocated in (True, False):
        assert predict_sync(Layout(4, 2), colocated=colocated).seconds <= 1.5


@pytest.mark.parametrize("workers", [4, 8])
def test_experts_go_from_shard_to_shard_where_engines_have_more_workers_than_stages(workers):
    """Qwen3-235B-A22B in four stages on 128 GPUs, on paper: 12 seconds at most."""
    spec = model_spec(KNOWN["Qwen3-235B-A22B"])

    def of(colocated):
        layout = Layout(4, 4, 8, expert_parallel=8)
        return predict_sync(layout, colocated=colocated, spec=spec, buckets=890, engine_tp=workers)

    network, experts = 50e9 * 0.7, 2 * spec.num_expert_parameters
    dense = 2 * spec.num_parameters - experts
    lacks = 31 / 32
    # A stage's 32 ranks send 16 of each of eight slices, a fourth of the experts at a time.
    share = 4 / 8 if workers == 8 else lacks
    assert of(True).gather_s == pytest.approx((lacks * dense + share * experts) / network)
    assert (of(True).seconds < 12) == (workers == 8)
    # Where engines have other GPUs, one of 32 ranks for each worker gets and sends its share.
    apart = of(False)
    assert apart.gather_s == pytest.approx((lacks * dense + experts / workers) / network)
    copied = (8 * (dense + experts / workers) + experts) / 3350e9
    passed_on = lacks * dense + experts / 32
    sent = dense + experts / workers + passed_on
    assert apart.send_s == pytest.approx(sent / network + copied)
    assert max(apart.gather_s, apart.send_s) < (6 if workers == 4 else 3.5)


def test_an_engine_of_one_worker_and_one_with_more_workers_than_ranks_get_all_over_nccl():
    spec = model_spec(KNOWN["Qwen3-30B-A3B"])
    weights_bytes = 2 * spec.num_parameters

    def of(actor, workers):
        return predict_sync(actor, colocated=False, spec=spec, buckets=64, engine_tp=workers)

    whole_s = weights_bytes / (50e9 * 0.7) + 8 * weights_bytes / 3350e9
    assert of(Layout(expert_parallel=8), 1).send_s == pytest.approx(whole_s)
    assert of(Layout(2), 4).send_s == pytest.approx(whole_s)
    assert of(Layout(2), 2).send_s < 0.6 * whole_s
    # On one node, what ranks pass on to each other goes over its links.
    assert of(Layout(expert_parallel=8), 8).seconds < 1


@pytest.mark.parametrize(
    ("model", "mib"),
    [("DeepSeek-R1-Distill-Qwen-7B", 512), ("Qwen3-30B-A3B", 909), ("Qwen3-235B-A22B", 2048)],
)
def test_buckets_grow_with_the_model_on_cuda(model, mib):
    weights_bytes = 2 * model_spec(KNOWN[model]).num_parameters
    given = WeightsConfig().bucket_size_mib
    assert bucket_mib(given, weights_bytes) == mib
    assert bucket_mib(given, weights_bytes, cuda=False) == 512
    assert bucket_mib(7, weights_bytes) == bucket_mib(7, weights_bytes, cuda=False) == 7


def test_the_command_takes_the_runs_buckets(capsys):
    layout = ["actor.tensor_parallel=4", "actor.pipeline_parallel=4", "actor.expert_parallel=8"]
    words = ["plan", "weights", "model.path=Qwen3-235B-A22B", *layout, "rollout.tensor_parallel=8"]
    assert main([*words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    sizes = [bucket["num_bytes"] for bucket in planned["buckets"]]
    assert 2000 * 2**20 < max(sizes) <= 2048 * 2**20
    assert planned["times"]["ipc"]["seconds"] <= 9


def test_the_command_says_seconds_and_why(capsys):
    words = ["plan", "weights", "model.path=Qwen2.5-1.5B", "--gpu", "h200"]
    assert main([*words, "--network-gb-per-s", "25"]) == 0
    printed = capsys.readouterr().out
    assert "nodes of 8 h200, 450 GB/s on a node and 25 between" in printed
    assert "weights.transport=auto takes ipc: engines share the actor's GPUs" in printed
    assert main([*words, "cluster.placement=separate", "--json"]) == 0
    of = json.loads(capsys.readouterr().out)["times"]
    assert list(of) == ["nccl"]
    nccl = of["nccl"]
    assert nccl["seconds"] == max(nccl["gather_s"], nccl["send_s"]) + nccl["calls_s"]
