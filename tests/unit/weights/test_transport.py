import dataclasses
import functools
import os
import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.actor.group import ActorGroup
from rlmath.checks.run import names
from rlmath.config.load import load
from rlmath.engines.transport import (
    TRANSPORTS,
    SyncBuffers,
    SyncSizes,
    choose_transport,
    transport_named,
)
from rlmath.engines.transports import TransportPlan, segments
from rlmath.engines.transports.shared_gpus import (
    WorkerPlace,
    plans_of_ranks,
    serving_ranks,
    with_worker_shares,
)
from rlmath.errors import ComponentError, ConfigError, UserError, WeightsError
from rlmath.weights.buckets import TensorMeta, cut_into_buckets, view_in_buffer
from rlmath.weights.expert_shares import NOTHING, ExpertShare
from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.tensor_prints import rows_of
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

MIB = 2**20


@pytest.mark.parametrize(
    ("transport", "trainer_mib", "engine_mib"),
    [
        # Two gathered and one packed; vLLM's last tensor and its shared buffer.
        ("ipc", 5 * 1090, 1090 + 2 * 1090),
        ("nccl", 3 * 1090 + 2 * (512 + 1090), 2 * (512 + 1090) + 2 * 1090),
        ("shared_memory", 2 * 1090, 0),
    ],
)
def test_buffers_of_a_tensor_larger_than_the_bucket(transport, trainer_mib, engine_mib):
    found = transport_named(transport).plan_bytes(SyncSizes(512 * MIB, 1090 * MIB))
    assert found == SyncBuffers(trainer_mib * MIB, engine_mib * MIB)


def test_one_rank_packs_nothing_and_engine_ranks_share_a_module():
    sizes = SyncSizes(
        512 * MIB,
        100 * MIB,
        model_ranks=1,
        largest_module_bytes=800 * MIB,
        engine_tensor_parallel=4,
    )
    found = transport_named("ipc").plan_bytes(sizes)
    assert found == SyncBuffers((3 * 512 + 100) * MIB, (512 + 800 + 200) * MIB)


@pytest.mark.parametrize(
    ("device", "colocated", "fitting"),
    [("cpu", False, "shared_memory"), ("cuda", True, "ipc"), ("cuda", False, "nccl")],
)
def test_one_transport_fits_where_the_weights_go(device, colocated, fitting):
    assert choose_transport("auto", device=device, colocated=colocated) == fitting
    assert choose_transport(fitting, device=device, colocated=colocated) == fitting
    for other in set(TRANSPORTS.names()) - {fitting}:
        with pytest.raises(ValueError, match=rf"transport={other}: .* has to be {fitting}"):
            choose_transport(other, device=device, colocated=colocated)


@pytest.mark.parametrize(
    ("shape", "dtype", "stride_bytes"),
    [
        # 1280 x 4 = 5120 bytes = 80 cache lines, an even number: one more.
        ((7, 1280), torch.float32, 5120 + 64),
        ((7, 1296), torch.float32, 1296 * 4),
        ((7, 1280), torch.bfloat16, 2560 + 64),
        ((7, 33), torch.bfloat16, 66),
        ((0, 1280), torch.float32, 5120 + 64),
        ((7,), torch.float32, 0),
        ((2, 3, 64), torch.float32, 0),
    ],
)
def test_rows_of_a_matrix_are_an_odd_number_of_cache_lines_apart(shape, dtype, stride_bytes):
    meta = TensorMeta("one", shape, dtype)
    assert meta.row_stride_bytes == stride_bytes
    (bucket,) = cut_into_buckets([meta], 1)
    view = view_in_buffer(torch.zeros(bucket.num_bytes, dtype=torch.uint8), bucket.tensors[0])
    assert view.shape == torch.Size(shape)
    if stride_bytes and shape[0]:
        assert view.stride() == (stride_bytes // dtype.itemsize, 1)
    assert meta.num_bytes == torch.Size(shape).numel() * dtype.itemsize


def test_tensors_of_a_bucket_keep_out_of_each_others_way():
    metas = [
        TensorMeta(str(i), shape, dtype)
        for i, (shape, dtype) in enumerate(
            [
                ((5, 64), torch.float32),
                ((3,), torch.bfloat16),
                ((9, 17), torch.float32),
                ((4, 2, 32), torch.float32),
                ((16, 128), torch.bfloat16),
            ]
        )
    ]
    (bucket,) = cut_into_buckets(metas, 1)
    buffer = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
    values = {meta.name: torch.randn(meta.shape).to(meta.dtype) for meta in metas}
    for tensor in bucket.tensors:
        view_in_buffer(buffer, tensor).copy_(values[tensor.meta.name])
    for tensor in bucket.tensors:
        assert view_in_buffer(buffer, tensor).equal(values[tensor.meta.name])
        assert tensor.offset_bytes % 64 == 0
    # Written and read, the gaps stay what they were.
    written = sum(meta.num_bytes for meta in metas)
    assert (buffer == 255).sum() >= bucket.num_bytes - written


def ours():
    return [name for name in os.listdir(segments.FOLDER) if name.startswith("rlmath_full")]


def test_full_shared_memory_is_an_error_with_the_arithmetic():
    stat = os.statvfs(segments.FOLDER)
    each = stat.f_bavail * stat.f_frsize // 2 + 2**20
    with pytest.raises(UserError, match=r"(?s)shared memory, but /dev/shm has .*bucket_size_mib"):
        segments.NamedSegments("full", [each, each])
    assert not ours()


def test_shared_memory_that_another_process_takes_first(monkeypatch):
    monkeypatch.setattr(segments, "_refuse_unless_free", lambda sizes_bytes: None)
    stat = os.statvfs(segments.FOLDER)
    # More than there is at all: the kernel refuses it without filling it.
    with pytest.raises(UserError, match=r"make /dev/shm larger"):
        segments.NamedSegments("full", [stat.f_blocks * stat.f_frsize + 2**20])
    assert not ours()


@given(st.sampled_from([(7,), (5, 3), (1, 8), (4, 2, 3)]), st.lists(st.integers(0, 24), max_size=3))
def test_parts_add_up_to_the_whole(shape, cuts):
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    size = values.numel()
    places = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [part for start, end in pairwise(places) for part in rows_of(values, start, end)]
    found = functools.reduce(add, (fingerprint(block, row) for row, block in parts))
    assert found == fingerprint(values)
    # Whole rows are no copies.
    whole = [block for _, block in parts if block.data_ptr() and len(block) > 1]
    assert all(block._base is not None for block in whole)


def gpus(count):
    return [f"GPU-{number:032x}" for number in range(count)]


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("count", [8, 1000])
def test_each_engine_is_served_by_the_ranks_on_its_gpus_alone(count, width):
    names = gpus(count)
    engine_gpus = [names[i : i + width] for i in range(0, count, width)]
    served = serving_ranks(names, engine_gpus)
    assert [rank for ranks in served for rank in ranks] == list(range(count))
    # A handle of a GPU is 8 fields with two of 64 bytes; what an engine is sent of a bucket does
    # not grow with the number of GPUs.
    sent = [{names[rank]: (bytes(64), bytes(64), *range(6)) for rank in ranks} for ranks in served]
    assert [list(handles) for handles in sent] == engine_gpus
    assert max(len(pickle.dumps(handles)) for handles in sent) < 300 * width


def test_ranks_without_an_engine_and_engines_in_any_order():
    names = gpus(8)
    assert serving_ranks(names, [[names[5], names[4]], [names[0], names[1]]]) == [(5, 4), (0, 1)]


def test_a_worker_without_a_rank_and_ranks_that_share_a_gpu_are_refused():
    with pytest.raises(WeightsError, match="engine 1 has workers on GPU-x"):
        serving_ranks(gpus(2), [gpus(1), ["GPU-x"]])
    with pytest.raises(WeightsError, match="3 trainer ranks have 2 GPUs"):
        serving_ranks([*gpus(2), *gpus(1)], [gpus(2)])


def engine(name, gpus, shares=(None, None)):
    """A handle of one with two workers."""
    places = [WorkerPlace(gpu, share) for gpu, share in zip(gpus, shares, strict=True)]
    return SimpleNamespace(name=name, call_workers=SimpleNamespace(remote=lambda _: places))


def plan(*engines, transport="ipc"):
    return TransportPlan(transport, engines, 2, 1, "run")


def test_a_rank_gets_the_handle_of_the_engine_that_it_calls(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names = gpus(5)
    one, other = engine("one", [names[3], names[0]]), engine("other", names[1:3])
    found = plans_of_ranks(plan(one, other), names)
    assert [own.engines for own in found] == [(), (other,), (), (one,), ()]
    assert [own.serves for own in found] == [(3, 0), (1, 2), (1, 2), (3, 0), ()]
    assert {own.num_engines for own in found} == {2}


def test_every_rank_knows_who_serves_an_engine_unless_all_do(monkeypatch):
    """After an engine's restart it is connected alone: other copies of the model gather nothing."""
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names = gpus(4)
    one, other = engine("one", names[:2]), engine("other", names[2:])
    assert [own.serving for own in plans_of_ranks(plan(one, other), names)] == [None] * 4
    assert [own.serving for own in plans_of_ranks(plan(other), names)] == [{2, 3}] * 4


def test_a_rank_needs_the_experts_of_the_worker_on_its_gpu(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names, halves = gpus(5), [ExpertShare(None, part, 2) for part in (0, 1)]
    one, other = engine("one", [names[3], names[0]], halves), engine("other", names[1:3], halves)
    found = plans_of_ranks(plan(one, other), names)
    assert [own.experts for own in found] == [halves[1], *halves, halves[0], NOTHING]
    # Adapters are sent whole, and so is all where a worker does not say what it keeps.
    adapters = dataclasses.replace(plan(one, other), adapters=True)
    silent = plan(one, engine("other", names[1:3], [halves[0], None]))
    for whole in (adapters, silent):
        assert {own.experts for own in plans_of_ranks(whole, names)} == {None}


def test_over_nccl_all_engines_say_the_same_of_their_workers_or_get_all(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    halves = [ExpertShare(None, part, 2) for part in (0, 1)]
    one, other = engine("one", gpus(2), halves), engine("other", gpus(2), halves)
    shared = plan(one, other, transport="nccl")
    assert with_worker_shares(shared).worker_shares == tuple(halves)
    otherwise = engine("other", gpus(2), halves[::-1])
    silent = engine("other", gpus(2), [halves[0], None])
    for whole in (
        plan(one, otherwise, transport="nccl"),
        plan(one, silent, transport="nccl"),
        plan(silent, transport="nccl"),
        dataclasses.replace(shared, adapters=True),
        # A single worker keeps all; it is not asked.
        dataclasses.replace(shared, engines=(None,), ranks_per_engine=1),
    ):
        assert with_worker_shares(whole) == whole


def test_the_driver_asks_ranks_and_engines_for_their_gpus(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    told = []
    actor = ActorGroup.__new__(ActorGroup)
    remote = SimpleNamespace(remote=lambda own: told.append(own))
    actor._workers = [SimpleNamespace(connect_engines=remote) for _ in range(4)]
    monkeypatch.setattr(actor, "_all", lambda method: {"gpu": gpus(4)}[method])
    actor._calls = SimpleNamespace(results=lambda calls, method: None)
    one, other = engine("one", gpus(4)[:2]), engine("other", gpus(4)[2:])
    actor.connect_engines(plan(one, other))
    assert [own.serves for own in told] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    told.clear()
    actor.connect_engines(plan(one, other, transport="nccl"))
    assert [own.engines for own in told] == [(one, other), (), (), ()]
    assert [own.num_engines for own in told] == [2] * 4
    assert [own.worker_shares for own in told] == [()] * 4
    told.clear()
    halves = [ExpertShare(None, part, 2) for part in (0, 1)]
    actor.connect_engines(plan(engine("moe", gpus(2), halves), transport="nccl"))
    assert [own.worker_shares for own in told] == [tuple(halves)] * 4


def test_an_engine_that_fails_meanwhile_is_a_part_of_the_run_that_failed(monkeypatch):
    def lose(refs):
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", lose)
    with pytest.raises(ComponentError, match="asked the engines for their GPUs"):
        plans_of_ranks(plan(engine("one", gpus(2))), gpus(2))


def test_a_transport_of_a_plugin_is_taken_where_it_is_named_and_fits(own_plugins):  # noqa: F811
    name = f"{EXAMPLES}/weight_transport.py:TimedSharedMemory"
    config = load([*GIVEN, f"weights.transport={name}"])
    assert not list(names(config)) and len(config.plugin_hashes) == 1
    assert choose_transport(name, device="cpu", colocated=False) == name
    assert choose_transport("auto", device="cpu", colocated=False) == "shared_memory"
    with pytest.raises(ValueError, match="has to be nccl, or auto"):
        choose_transport(name, device="cuda", colocated=False)
    assert config.weights.transport_options == {"longer_than_s": 0.0}
    with pytest.raises(ConfigError, match="longer_than_s = -1"):
        load([*GIVEN, f"weights.transport={name}", "weights.transport_options.longer_than_s=-1"])
    for transport, part in (
        ("auto", "weights.transport_options: are those of weights.transport, which is auto"),
        ("shared_memory", "transport=shared_memory has no such option; it has no options"),
    ):
        chosen = [f"weights.transport={transport}", "weights.transport_options={longer_than_s: 1}"]
        with pytest.raises(ConfigError, match=part):
            load([*GIVEN, *chosen])
    (message,) = names(load([*GIVEN, "weights.transport=shared_memry"]))
    assert "did you mean shared_memory" in message
