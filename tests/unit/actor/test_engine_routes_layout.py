"""Where the engine's routes lie among the tokens of a rank, and what a router makes of them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from rlmath import device
from rlmath.actor.engine_routes import EngineRoutes, UploadedRoutes, engine_routes
from rlmath.actor.routing_replay import RouterRecorder
from rlmath.actor.routing_totals import RoutingTotals
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.types import MicroBatch
from tests.unit.actor.test_route_recorder import best, scores_of

RECORD = RouterReplayAction.RECORD
CPU = torch.device("cpu")


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
