"""The engine's routes on real gloo ranks: every token goes where the engine sent it, or where the
router chooses if nothing is known of it, against transformers in float64 with those routes forced.
"""

import dataclasses
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.token_values import TokenValues
from rlmath.batching.shards import response_rows
from rlmath.model.parallel import Layout
from tests.support.actors import build, gather, make_batch

# Tensor ranks have a share of the tokens, stages of the layers.
LAYOUT = Layout(2, 2, 1, expert_parallel=2)
MOE_LAYERS = (0, 2, 3)
EXPERTS, TOPK = 4, 2


@pytest.fixture(scope="module")
def batch():
    """With routes that no router chose: of all tokens but a sequence's last, of a prefix of one
    sequence, and of nothing of another."""
    plain = make_batch()
    lengths = plain.sequence_lengths - 1
    lengths[3], lengths[7] = 5, 0
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(int(lengths.sum()), len(MOE_LAYERS), EXPERTS, generator=generator)
    routes = scores.topk(TOPK, dim=-1).indices.to(torch.uint8)
    return dataclasses.replace(plain, routes=routes, route_lengths=lengths)


@dataclasses.dataclass(frozen=True)
class Step:
    """Log-probs of three passes and of the update's first, and what the update reports."""

    old: TokenValues | None
    noisy: TokenValues | None
    reference: TokenValues | None
    first: TokenValues | None
    loss: float
    grad_norm: float
    routing: dict[str, float]


class Run:
    """One step of one minibatch, to go to the ranks.

    Args:
        recorded: With a pass before the update.
    """

    def __init__(self, recorded=True, replay="engine"):
        self.recorded, self.replay = recorded, replay

    def __call__(self, layout, platform, model, batch):
        # One of the stage's layers is run again in the backward pass, and others are not.
        settings = ModelSettings(
            torch.float32, sequence_parallel=True, recompute="full", recompute_num_layers=1
        )
        actor = build(
            layout,
            platform,
            model,
            model=settings,
            routing_replay=self.replay,
            # Passes that the update does not replay.
            max_tokens_per_forward=160,
        )
        update = StepPlan(routing_mismatch=True)
        shard = actor.shard_of(batch, update)
        rows = response_rows(shard.places, batch.response_lengths)

        def report(values):
            if values is None or not actor.reports:
                return None
            return dataclasses.replace(values, response_rows=rows)

        old = None
        if self.recorded:
            old = actor.shard_log_probs(shard, "old")
            values = torch.zeros(len(rows)) if old is None else old.log_probs
            shard = shard.with_values(old_log_probs=values)
        noisy = actor.shard_log_probs(shard, "noise", 3)
        actor.settings = dataclasses.replace(actor.settings, reference="frozen")
        actor.reference = [p.detach().clone() for p in actor._trainable_parameters()]
        reference = actor.shard_log_probs(shard, "reference")
        found = actor.update_shard(shard, update)
        return Step(
            *map(report, (old, noisy, reference, found.first)),
            found.minibatches[0]["loss"],
            found.minibatches[0]["grad_norm"],
            found.routing,
        )


def force_routes(model, batch):
    """Log-probs of all response tokens with the batch's routes, at the tests' temperature; of each
    layer the share of the tokens with routes that its router would send elsewhere; and how many
    tokens have none."""
    topk, found, unknown = torch.topk, [], 0
    changed = dict.fromkeys(MOE_LAYERS, 0)
    for prompt, tokens, routes in zip(
        batch.prompt_lengths.tolist(),
        batch.tokens.split(batch.sequence_lengths.tolist()),
        batch.routes.split(batch.route_lengths.tolist()),
        strict=True,
    ):
        layers = iter(enumerate(MOE_LAYERS))
        unknown += len(tokens) - len(routes)

        def choose(scores, k, dim=-1):
            column, layer = next(layers)  # noqa: B023
            own = topk(scores, k, dim=dim).indices
            chosen, count = own.clone(), len(routes)  # noqa: B023
            chosen[:count] = routes[:, column].long()  # noqa: B023
            differs = chosen.sort(1).values != own.sort(1).values
            changed[layer] += int(differs.any(1).sum())
            return scores.gather(dim, chosen), chosen

        with mock.patch("torch.topk", choose):
            logits = model(tokens[None]).logits[0]
        assert next(layers, None) is None
        log_p = (logits[prompt - 1 : -1] / 0.7).log_softmax(-1)
        found.append(log_p.gather(1, tokens[prompt:, None].long()).squeeze(1))
    known = int(batch.route_lengths.sum())
    return torch.cat(found), {n: count / known for n, count in changed.items()}, unknown


def load(mixture):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float64, experts_implementation="eager"
    )


@dataclasses.dataclass(frozen=True)
class Expected:
    log_probs: Tensor
    loss: float
    grad_norm: float
    changed: dict[int, float]
    missing: float
    mismatch: float
    mismatch_without_replay: float


@pytest.fixture(scope="module")
def expectation(mixture, batch):
    """The plain policy gradient: the old policy is the present one."""
    model = load(mixture)
    log_p, changed, unknown = force_routes(model, batch)
    ratio = (log_p - log_p.detach()).exp()
    mask = batch.loss_mask.double()
    loss = -(ratio * batch.advantages.double() * mask).sum() / mask.sum()
    loss.backward()
    squares = (float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    missing = unknown / int(batch.sequence_lengths.sum())
    with torch.no_grad():
        own = [
            (model(tokens[None]).logits[0][prompt - 1 : -1] / 0.7)
            .log_softmax(-1)
            .gather(1, tokens[prompt:, None].long())
            .squeeze(1)
            for prompt, tokens in zip(
                batch.prompt_lengths.tolist(),
                batch.tokens.split(batch.sequence_lengths.tolist()),
                strict=True,
            )
        ]
    mismatches = (
        float((values - batch.engine_log_probs.double())[batch.loss_mask].abs().mean())
        for values in (log_p.detach(), torch.cat(own))
    )
    norm = math.sqrt(sum(squares))
    return Expected(log_p.detach(), loss.item(), norm, changed, missing, *mismatches)


def mean_difference(found, log_probs):
    return float((found.log_probs.double() - log_probs).abs().mean())


def test_tokens_go_where_the_engine_sent_them(ranks, mixture, batch, expectation):
    """Data-parallel ranks: tests/unit/batching/test_shards.py, and a run of the e2e tier."""
    results = ranks.run(LAYOUT, Run(), mixture, batch)
    old, noisy, reference, first = (
        gather(batch, [getattr(one, name) for one in results])
        for name in ("old", "noisy", "reference", "first")
    )
    torch.testing.assert_close(old.log_probs.double(), expectation.log_probs, atol=2e-5, rtol=0)
    assert torch.equal(first.log_probs, old.log_probs)
    # The noise of the gate is that of the same routes; the reference chooses its own.
    assert 0 < mean_difference(noisy, expectation.log_probs) < 1e-4
    assert mean_difference(reference, expectation.log_probs) > 1e-2
    for one in results:
        check_update(one, expectation)
        # The update has the same weights, so its routers would choose what those of the pass did.
        share = one.routing["routing/engine_changed_share"] * (1 - expectation.missing)
        assert one.routing["routing/changed_share"] == pytest.approx(share)


def check_update(one, expected):
    assert one.loss == pytest.approx(expected.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    routing = one.routing
    assert routing["routing/engine_missing_share"] == pytest.approx(expected.missing, abs=1e-12)
    for layer, share in expected.changed.items():
        assert routing[f"routing/engine_changed_share/layer_{layer}"] == pytest.approx(share)
        assert routing[f"routing/max_load/layer_{layer}"] >= 1
    mean = sum(expected.changed.values()) / len(MOE_LAYERS)
    assert routing["routing/engine_changed_share"] == pytest.approx(mean)
    assert 0.5 < mean < 1
    for name in ("mismatch", "mismatch_without_replay"):
        assert routing[f"routing/{name}"] == pytest.approx(getattr(expected, name), abs=2e-6)
    assert abs(expected.mismatch - expected.mismatch_without_replay) > 1e-4


def test_an_update_without_a_pass_before_it(ranks, mixture, batch, expectation):
    """``algorithm.minibatches_per_step=1`` needs no old log-probs: the update records."""
    results = ranks.run(LAYOUT, Run(recorded=False), mixture, batch)
    first = gather(batch, [one.first for one in results])
    torch.testing.assert_close(first.log_probs.double(), expectation.log_probs, atol=2e-5, rtol=0)
    for one in results:
        check_update(one, expectation)
        assert "routing/changed_share" not in one.routing


def test_routes_of_the_neighboring_token_are_detected(mixture, batch, expectation):
    """A slice that is off by one fails the tests above."""
    shifted = dataclasses.replace(batch, routes=batch.routes.roll(1, 0))
    with torch.no_grad():
        log_p, _, _ = force_routes(load(mixture), shifted)
    assert float((log_p - expectation.log_probs).abs().mean()) > 1e-2
