"""Routes of one router: recorded, replayed, and the engine's; and what is counted of them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from rlmath import device
from rlmath.actor.engine_routes import EngineRoutes, UploadedRoutes, engine_routes
from rlmath.actor.routing_replay import RouterRecorder
from rlmath.actor.routing_totals import RoutingTotals
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.types import MicroBatch

RECORD, REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD
CPU = torch.device("cpu")


def best(scores, topk, *_, **__):
    values, indices = scores.topk(topk, dim=1)
    return values, indices


class Router:
    """A recorder, and passes of it over micro-batches of 4 tokens."""

    def __init__(self, experts=6):
        self.experts = experts
        self.module = SimpleNamespace(layer_number=3, router_replay=None)
        self.recorder = RouterRecorder(self.module, experts)
        self.totals = RoutingTotals.zeros(4, experts, CPU)

    def begin(self, action, count, first=0):
        text = [torch.ones(4, dtype=torch.bool)] * count
        self.recorder.begin(action, first, text, self.totals)

    def route(self, scores):
        return self.recorder.get_replay_topk(scores, 2, None, None, best)


def scores_of(seed, experts=6):
    return torch.randn(4, experts, generator=torch.Generator().manual_seed(seed))


def test_one_pipeline_schedule_with_a_recomputed_layer():
    """Two forward passes before the first backward pass, as on a first stage: F0 F1 B0 F2 B1 B2."""
    router = Router()
    assert router.module.router_replay is router.recorder
    assert router.recorder not in RouterReplay.global_router_replay_instances
    before = [scores_of(i) for i in range(5)]
    router.begin(RECORD, 5)
    with torch.no_grad():
        recorded = [router.route(one)[1] for one in before]
    router.recorder.check_calls()
    router.recorder.end()
    assert [r.dtype for r in router.recorder.routes] == [torch.uint8] * 5
    # The second minibatch: micro-batches 2, 3 and 4, with other scores.
    now = [scores_of(10 + i) for i in range(3)]
    router.begin(REPLAY, 3, first=2)
    for kind, index in zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True):
        with torch.set_grad_enabled(kind == "B"):
            values, indices = router.route(now[index])
        assert torch.equal(indices, recorded[2 + index])
        assert torch.equal(values, now[index].gather(1, indices))
    router.recorder.check_calls()
    router.recorder.end()
    compared, changed, *load = router.totals.counts[2].tolist()
    assert compared == 3 * 4, "each token once, though its layer ran twice"
    assert 0 < changed <= compared
    assert sum(load) == 5 * 4 * 2
    free = router.route(now[0])
    assert torch.equal(free[1], best(now[0], 2)[1]), "free again"


def test_many_experts_need_two_bytes():
    router = Router(experts=300)
    router.begin(RECORD, 1)
    scores = scores_of(0, 300)
    _, indices = router.route(scores.flip(1))
    assert router.recorder.routes[0].dtype == torch.int16
    assert torch.equal(router.recorder.routes[0].long(), indices)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_another_number_of_calls_is_an_error(calls):
    router = Router()
    router.begin(RECORD, 2)
    router.recorder._is_text *= 2  # Room for the third.
    with torch.no_grad():
        for i in range(calls):
            router.route(scores_of(i))
    router.recorder._is_text = router.recorder._is_text[:2]
    with pytest.raises(RuntimeError, match="layer 2: the router ran"):
        router.recorder.check_calls()


def test_replay_of_other_tokens_is_an_error():
    router = Router()
    router.begin(RECORD, 1)
    router.route(scores_of(0))
    router.recorder.end()
    router.begin(REPLAY, 1)
    with pytest.raises(RuntimeError, match=r"layer 2: recorded routes are \[4, 2\].*\[3, 2\]"):
        router.route(scores_of(1)[:3])


def test_padding_and_the_order_of_experts_do_not_count():
    totals = RoutingTotals.zeros(2, 4, CPU)
    text = torch.tensor([True, True, True, False])
    before = torch.tensor([[0, 1], [2, 3], [0, 2], [0, 1]])
    now = torch.tensor([[1, 0], [2, 1], [0, 2], [2, 3]])
    totals.add_load(1, before, text)
    totals.add_compared(1, before, now, text)
    assert totals.counts[1].tolist() == [3, 1, 2, 1, 2, 1]
    found = totals.metrics([False, True])
    assert found == {
        "routing/changed_share": pytest.approx(1 / 3),
        "routing/changed_share/layer_1": pytest.approx(1 / 3),
        "routing/max_load/layer_1": pytest.approx(2 / 1.5),
        "routing/min_load/layer_1": pytest.approx(1 / 1.5),
    }


def test_each_tensor_rank_has_its_own_tokens():
    """Sequences of 3, 4 and 5 tokens, of which 2, 0 and 4 have routes, in one row of 14 and two
    ranks; the second sequence is in another micro-batch."""
    plain = batch_of_sequences([([1, 1], [1]), ([2, 2], [2, 2]), ([3, 3], [3, 3, 3])])
    routes = torch.arange(6 * 2 * 3, dtype=torch.uint8).view(6, 2, 3)
    batch = dataclasses.replace(plain, routes=routes, route_lengths=torch.tensor([2, 0, 4]))
    one = MicroBatch((2, 0), 8)
    halves = [engine_routes(batch, one, places, 2, 3) for places in (range(5), range(5, 10))]
    both = torch.cat([half.routes for half in halves])
    is_known = torch.cat([half.is_known for half in halves])
    assert is_known.tolist() == [True] * 4 + [False] + [True] * 2 + [False] * 3
    assert torch.equal(both[is_known], routes[[2, 3, 4, 5, 0, 1]])
    other = engine_routes(batch, MicroBatch((1,), 4), range(4), 2, 3)
    assert not other.is_known.any()
    none = engine_routes(plain, one, range(8), 2, 3)
    assert not none.is_known.any() and none.routes.shape == (8, 2, 3)
    with pytest.raises(ValueError, match=r"have 2 layers and 3 .* the model has 5 and 3"):
        engine_routes(batch, one, range(8), 5, 3)
    longer = dataclasses.replace(batch, route_lengths=torch.tensor([0, 0, 6]))
    with pytest.raises(ValueError, match="more tokens than it has"):
        engine_routes(longer, one, range(8), 2, 3)


def test_a_router_follows_the_engine_where_it_knows_the_route():
    recorder = RouterRecorder(SimpleNamespace(layer_number=3, router_replay=None), 6)
    totals = RoutingTotals.zeros(4, 6, CPU)
    text = [torch.tensor([True, True, True, False])]
    scores = scores_of(0)
    own = best(scores, 2)[1]
    routes = torch.stack([torch.zeros_like(own), (own + 1) % 6], dim=1).to(torch.uint8)
    given = [EngineRoutes(routes, torch.tensor([True, False, True, False]))]
    recorder.begin(RECORD, 0, text, totals)
    recorder.follow(UploadedRoutes(given, device.CPU), 1)
    # A layer that is run again in the backward pass.
    with torch.no_grad():
        first = recorder.get_replay_topk(scores, 2, None, None, best)
    again = recorder.get_replay_topk(scores * 2, 2, None, None, best)
    recorder.check_calls()
    recorder.end()
    wanted = torch.where(given[0].is_known[:, None], (own + 1) % 6, own)
    assert torch.equal(first[1], wanted) and torch.equal(again[1], wanted)
    assert torch.equal(first[0], scores.gather(1, wanted))
    assert torch.equal(again[0], 2 * scores.gather(1, wanted))
    assert totals.engine[2].tolist() == [3, 2, 2]
    found = totals.metrics([False, False, True, False])
    assert found["routing/engine_missing_share"] == pytest.approx(1 / 3)
    assert found["routing/engine_changed_share"] == 1.0
    assert found["routing/engine_changed_share/layer_2"] == 1.0
    assert "routing/changed_share" not in found


def test_a_pass_that_keeps_nothing_leaves_what_was_recorded():
    recorder = RouterRecorder(SimpleNamespace(layer_number=1, router_replay=None), 6)
    totals = RoutingTotals.zeros(1, 6, CPU)
    text = [torch.ones(4, dtype=torch.bool)]
    routes = torch.tensor([[[4, 5]]], dtype=torch.uint8).expand(4, 1, 2)
    given = [EngineRoutes(routes, torch.ones(4, dtype=torch.bool))]
    recorder.begin(RECORD, 0, text, totals)
    with torch.no_grad():
        recorder.get_replay_topk(scores_of(0), 2, None, None, best)
    recorder.end()
    before = totals.counts.clone(), recorder.routes[0].clone()
    recorder.begin(RECORD, 0, text, None)
    recorder.follow(UploadedRoutes(given, device.CPU), 0)
    with torch.no_grad():
        _, indices = recorder.get_replay_topk(scores_of(1), 2, None, None, best)
    recorder.end()
    assert (indices == torch.tensor([4, 5])).all()
    assert len(recorder.routes) == 1 and torch.equal(recorder.routes[0], before[1])
    assert torch.equal(totals.counts, before[0]) and not totals.engine.any()
    recorder.begin(RECORD, 0, text, None)
    fewer = EngineRoutes(routes[:3], given[0].is_known[:3])
    recorder.follow(UploadedRoutes([fewer], device.CPU), 0)
    with pytest.raises(RuntimeError, match="layer 0: the engine's routes are of 3 tokens"):
        recorder.get_replay_topk(scores_of(1), 2, None, None, best)


class Device:
    """A platform that notes what is page-locked, with a device that notes what comes to it."""

    torch_device = torch.device("meta")

    def __init__(self):
        self.locked: list[tuple[int, ...]] = []

    def page_locked(self, tensor):
        self.locked.append(tuple(tensor.shape))
        return tensor


def test_routers_of_all_layers_share_one_upload_of_a_micro_batch():
    engine = [
        EngineRoutes(torch.zeros(tokens, 4, 2, dtype=torch.uint8), torch.ones(tokens) > 0)
        for tokens in (5, 3)
    ]
    platform = Device()
    uploaded = UploadedRoutes(engine, platform)
    assert platform.locked == [(5, 4, 2), (5,), (3, 4, 2), (3,)]
    first = uploaded.of(0)
    assert first.routes.device.type == first.is_known.device.type == "meta"
    assert all(uploaded.of(0) is first for _ in range(4))
    second = uploaded.of(1)
    assert second.routes.shape == (3, 4, 2)
    # One is held at a time; an interleaved schedule comes back to one that was dropped.
    again = uploaded.of(0)
    assert again is not first and again.routes.shape == (5, 4, 2)
    assert engine[0].routes.device.type == "cpu"
