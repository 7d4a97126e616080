"""The recorder of one router, and what is counted, without a model."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from rlmath.actor.routing_replay import RouterRecorder
from rlmath.actor.routing_totals import RoutingTotals

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


def test_other_tokens_are_an_error():
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
