"""vLLM's own producers and consumers of weights, driven by the project's ``connect``.

Streams, the allocator and the wire are played (``fake_cuda.py``, ``vllm_worker.py``); what cuts,
packs, sends, takes apart and loads is vLLM's and the project's own code.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import Tensor

from rlmath.actor.offload import DeviceState
from rlmath.actor.worker import ActorWorker
from rlmath.device import Platform
from rlmath.device.streams import SideStream
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.transport import SyncSizes, transport_named
from rlmath.engines.transports.connection import connect
from rlmath.errors import WeightsError
from rlmath.model.published import KNOWN
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import model_spec
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from rlmath.weights.gather import BucketGatherer
from tests.contracts.fake_cuda import FakeCuda, LiveBytes, Races
from tests.contracts.vllm_worker import join, plan_for
from tests.support.program_answers import answer_of
from tests.unit.weights.model_ranks import gatherer_of, modules_like
from tests.unit.weights.shapes import QWEN2, QWEN3_MOE

CUDA = Platform("cuda", "nccl", "local")
MIB = 2**20
DENSE, MOE = (replace(shape, layers=8, vocab=64, dense_layers=()) for shape in (QWEN2, QWEN3_MOE))
BACKENDS = ("ipc", "nccl")
PRESETS = {
    file.stem: Path(yaml.safe_load(file.read_text())["model"]["path"]).name
    for file in sorted(Path("conf/model").glob("*.yaml"))
    if file.stem != "tiny"
}


@pytest.fixture
def cuda():
    from vllm.distributed.weight_transfer import packed_tensor

    yield FakeCuda()
    packed_tensor._get_streams.cache_clear()


class Tensors:
    """Given tensors where a gatherer stands."""

    def __init__(self, tensors, bucket_size_mib):
        self.values, self.ranks = tensors, [0]
        self.tensors = [TensorMeta(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]
        self.buckets = cut_into_buckets(self.tensors, bucket_size_mib)

    def gather(self, destination, routes, keeps):
        for bucket in self.buckets:
            yield [(t.meta.name, self.values[t.meta.name]) for t in bucket.tensors]


def awkward_tensors(seed):
    """Around a bucket of 1 MiB."""
    generator = torch.Generator().manual_seed(seed)

    def of(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    return {
        "three buckets": of(3 * MIB // 2),
        "a bit": of(5),
        "empty": of(0, 7),
        "a bucket": of(512, 1024),
        "an element more": of(MIB // 2 + 1),
        "not contiguous": of(300, 200).t(),
        "every second row": of(64, 32)[::2],
        "scalar": of(1)[0],
        "empty again": of(0),
        # After it nothing may follow whose type is wider: see the test below.
        "a byte more": torch.randint(0, 255, (MIB + 1,), generator=generator, dtype=torch.uint8),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_any_size_arrive_twice(monkeypatch, cuda, backend):
    """``ipc`` refused a tensor larger than the bucket, as every 7B embedding is."""
    worker = join(monkeypatch, backend, cuda, "cpu")
    source = Tensors(awkward_tensors(0), 1)
    connection = connect(plan_for(worker, backend, 1), source, CUDA)
    for version in (1, 2):
        source.values = awkward_tensors(version)
        connection.send_weights(version)
        assert len(worker.updates) == version
        assert list(worker.updates[-1]) == list(source.values)
        for name, tensor in source.values.items():
            assert torch.equal(worker.updates[-1][name], tensor), name


def test_vllm_refuses_unaligned_tensors():
    """A tensor whose place is no multiple of its element's size cannot be unpacked. The weights are
    of one type, so every place is; a second type (float32 routers, say) would need padding."""
    from vllm.distributed.weight_transfer import packed_tensor

    packed = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="storage_offset"):
        packed_tensor.unpack_tensor(
            packed, ["a", "b"], [[1], [2]], [torch.uint8, torch.bfloat16], [1, 4]
        )


def test_each_engine_gets_the_handles_of_its_own_gpus_without_a_barrier_of_the_world(tmp_path):
    """Four ranks and two engines of two GPUs: rank 0 calls the first, rank 2 the second."""
    ranks = answer_of("tests.contracts.ipc_ranks", tmp_path)
    assert [rank["of_world"] for rank in ranks] == [[]] * 4

    def update(*gpus):
        buckets = [["update_weights", list(gpus)]] * 3
        return [["start_weight_update", []], *buckets, ["finish_weight_update", []]]

    opened = ["init_weight_transfer_engine", []]
    first = [opened, *update("GPU-0", "GPU-1"), *update("GPU-0", "GPU-1")]
    second = [opened, *update("GPU-2", "GPU-3"), *update("GPU-2", "GPU-3")]
    assert [rank["calls"] for rank in ranks] == [[first, []], [[], []], [[], second], [[], []]]
    # No rank fills its buffer again before its engine has read all of them.
    for rank, caller in zip(ranks, (0, 0, 2, 2), strict=True):
        read_s = ranks[caller]["read_s"]
        assert len(rank["full_s"]) == len(read_s) == 6
        assert all(full > read for full, read in zip(rank["full_s"][1:], read_s[:-1], strict=True))


def test_a_rank_whose_gpu_has_no_engine_exports_no_buffer(monkeypatch, cuda):
    """torch keeps an exported buffer until a reader has opened it and let go of it: a rank without
    a reader would lose one at every weight sync."""
    from vllm.distributed.weight_transfer import packed_tensor

    worker = join(monkeypatch, "ipc", cuda, "cpu")
    exports = []
    export = packed_tensor.reduce_tensor

    def note(buffer):
        exports.append(buffer)
        return export(buffer)

    monkeypatch.setattr(packed_tensor, "reduce_tensor", note)
    source = Tensors(awkward_tensors(0), 1)
    gathered = []

    class Noted(dict[str, Tensor]):
        def __getitem__(self, name):
            gathered.append(name)
            return super().__getitem__(name)

    source.values = Noted(source.values)
    plan = plan_for(worker, "ipc", 1)
    alone = replace(plan, engines=(), others=1, serves=())
    connection = connect(alone, source, CUDA)
    for version in (1, 2):
        connection.send_weights(version)
        # It takes part in the gathering all the same.
        assert gathered == version * list(source.values)
    assert not exports and not worker.updates
    # A copy of the model none of whose ranks serves an engine gathers nothing: its
    # GPUs may be full of keys and values, and only an engine on others was started again.
    source.ranks = [2, 3]
    for serving, passes in (({0, 1}, 2), ({3}, 3)):
        among = replace(alone, serving=frozenset(serving))
        connect(among, source, CUDA).send_weights(3)
        assert gathered == passes * list(source.values)
    connection = connect(plan, source, CUDA)
    connection.send_weights(4)
    assert len(exports) == len(worker.updates) == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_stream_reads_or_writes_too_early(monkeypatch, cuda, backend, shape, ranks):
    """Gathering, packing and sending, in two updates with an optimizer's step before each."""
    assert not races(monkeypatch, cuda, backend, shape, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_missing_wait_is_found(monkeypatch, cuda, ranks):
    """The test above can fail: with everything on whatever stream vLLM has, as it was."""
    monkeypatch.setattr(Platform, "side_stream", lambda _: SideStream())
    monkeypatch.setattr("rlmath.engines.transport.NCCL_MESSAGES", 2)
    assert races(monkeypatch, cuda, "nccl", DENSE, ranks)


def races(monkeypatch, cuda, backend, shape, ranks):
    worker = join(monkeypatch, backend, cuda, "cpu")
    # Buckets of a few kilobytes: dozens of them, and messages that end elsewhere.
    gatherer, model = gatherer_of(monkeypatch, shape, ranks, 0.01)
    cuda.install_messages(monkeypatch)
    monkeypatch.setattr("rlmath.engines.transport.MIB", 8192)
    connection = connect(plan_for(worker, backend, 1), gatherer, CUDA)
    with Races(cuda), torch.no_grad():
        for version in (1, 2):
            for parameter in model.parameters():
                parameter.add_(1)
            connection.send_weights(version)
    assert len(gatherer.buckets) > 5
    assert [list(update) for update in worker.updates] == 2 * [[t.name for t in gatherer.tensors]]
    return cuda.races


def test_a_rank_that_only_sends_changes_its_weights_after_they_are_sent(monkeypatch, cuda):
    """vLLM gives such a rank no tensors, and waits for its current stream only."""
    from rlmath.engines.transports.vllm_source import GatheredSource

    cuda.install(monkeypatch, "cpu")
    gatherer, model = gatherer_of(monkeypatch, DENSE, 2, 0.01)
    cuda.install_messages(monkeypatch)
    side_stream = CUDA.side_stream()
    with Races(cuda), torch.no_grad():
        for _ in range(2):
            side_stream.start()
            assert not list(GatheredSource(gatherer, 1, side_stream))
            for parameter in model.parameters():
                parameter.add_(1)
    assert not cuda.races


def test_a_rank_stays_on_its_stream_when_it_connects(monkeypatch, cuda):
    """vLLM gives a thread that it has not seen on a stream a new one, and leaves it there: a rank's
    later steps would run beside memory and gradients of the old one."""
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.utils import torch_utils

    worker = join(monkeypatch, "nccl", cuda, "cpu")
    a_gpu = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr("vllm.platforms.current_platform", a_gpu)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", SimpleNamespace())
    monkeypatch.setattr(torch_utils, "prev_set_stream", cuda.set_stream)
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    open_channel, streams = nccl_engine.open_trainer_endpoint, []

    def open_as_vllm(info):
        streams.append(torch_utils.current_stream())
        return open_channel(info)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_as_vllm)
    connect(plan_for(worker, "nccl", 1), Tensors(awkward_tensors(0), 1), CUDA)
    assert streams and streams[0] is not cuda.default
    assert torch.cuda.current_stream() is cuda.default


def rank_of(patch):
    """A Megatron rank's Ray actor as far as it serves engines."""
    parallel = ParallelRank()
    rank = ActorWorker.__new__(ActorWorker)
    rank.rank, rank.platform, rank.connection = 0, CUDA, None
    # Without a GPU there is no peak to read.
    patch.setattr(rank, "_note_peak", lambda phase: None)
    module = modules_like(DENSE, 0, parallel, dtype=torch.bfloat16)
    state = DeviceState(module, [], None, CUDA)
    rank.actor = SimpleNamespace(
        merger=lambda: None,
        gatherer=partial(BucketGatherer, [module], DENSE, parallel),
        device_state=state,
    )
    return rank


def test_reconnecting_shuts_the_connection_before_down(monkeypatch, cuda, caplog):
    """After an engine's restart: a communicator that is only dropped stays on every GPU."""
    worker = join(monkeypatch, "nccl", cuda, "cpu")
    rank, plan = rank_of(monkeypatch), plan_for(worker, "nccl", 1)
    for count in (1, 2, 3):
        rank.connect_engines(plan)
        destroyed = [channel.destroyed for channel in worker.channels]
        assert destroyed == [1] * (count - 1) + [0]
        rank.send_weights(count)
    assert len(worker.updates) == 3

    def break_down():
        raise RuntimeError("an unhandled CUDA error")

    # An old connection that is broken is no reason to go without a new one.
    monkeypatch.setattr(worker.channels[-1], "destroy", break_down)
    rank.connect_engines(plan)
    rank.send_weights(4)
    assert len(worker.updates) == 4
    assert "an unhandled CUDA error" in caplog.text


def test_a_reconnect_that_fails_leaves_no_half_open_connection(monkeypatch, cuda):
    worker = join(monkeypatch, "nccl", cuda, "cpu")
    rank, plan = rank_of(monkeypatch), plan_for(worker, "nccl", 1)
    with pytest.raises(RuntimeError, match="rank 0 is not connected to the engines"):
        rank.send_weights(1)
    rank.connect_engines(plan)

    def refuse(_):
        raise RuntimeError("the engine is not ready")

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "init_transfer_engine", refuse)
        with pytest.raises(RuntimeError, match="the engine is not ready"):
            rank.connect_engines(plan)
    assert worker.channels[0].destroyed == 1
    with pytest.raises(RuntimeError, match="connect_engines was not called, or failed"):
        rank.send_weights(1)
    rank.connect_engines(plan)
    rank.send_weights(1)
    assert len(worker.updates) == 1


def test_an_engine_drops_its_old_connection_before_it_takes_a_new_one():
    calls = []
    engine = RolloutEngine.__new__(RolloutEngine)
    engine._loop = SimpleNamespace(rpc=lambda method, **_: calls.append(method))
    engine.init_weight_transfer_engine({})
    assert calls == ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"]


def test_a_worker_that_keeps_other_experts_than_it_is_sent_says_so():
    from rlmath.engines.transports.nccl_shares_engine import SharesEngine

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1), model_config=None)
    engine = SharesEngine(None, vllm_config, torch.device("cpu"), torch.nn.Module())
    info = engine.parse_init_info(
        {
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": 2,
            "senders": [["127.0.0.1", 1], ["127.0.0.1", 2]],
            "shares": [[None, 0, 2], [None, 1, 2]],
            "experts": {},
        }
    )
    with pytest.raises(WeightsError, match="worker 1 keeps None of the experts"):
        engine.init_transfer_engine(info)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_syncs_within_the_planned_buffers(monkeypatch, cuda, preset, backend):
    """Its real shapes, on meta tensors, from one of two ranks; names, shapes, types and bytes."""
    whole = model_spec(KNOWN[PRESETS[preset]])
    # One layer is like the next.
    shape = replace(whole, layers=2 if whole.experts else 8)
    worker = join(monkeypatch, backend, cuda, "meta")
    gatherer, _ = gatherer_of(monkeypatch, shape, 2, 512, "meta")
    cuda.install_messages(monkeypatch)
    connection = connect(plan_for(worker, backend, 512), gatherer, CUDA)
    largest = max(t.num_bytes for t in gatherer.tensors)
    with LiveBytes("meta") as memory:
        for version in (1, 2):
            connection.send_weights(version)
    sent = {t.name: (t.shape, t.dtype, t.num_bytes) for t in gatherer.tensors}
    for update in worker.updates:
        assert sent == {n: (tuple(t.shape), t.dtype, t.nbytes) for n, t in update.items()}
    assert len(worker.updates) == 2
    bound = transport_named(backend).plan_bytes(SyncSizes(512 * MIB, largest)).trainer_bytes
    assert 0.5 * bound < memory.peak <= bound
