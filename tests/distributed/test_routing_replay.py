"""Routing replay on real gloo ranks: the update takes the routes of the old-log-prob pass.

Routes are made to flip in the two ways in which they do: the weights have changed since (the second
minibatch of a step, and here the routers alone), and experts that are equally good change places.
"""

import contextlib
import dataclasses
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.token_values import TokenValues
from rlmath.batching.shards import response_rows
from rlmath.checkpoint.state import load_model, save_model
from rlmath.model.parallel import Layout
from tests.support.actors import build, gather, make_batch
from tests.support.models import make_mixture
from tests.support.resumed_runs import assert_equal, commit, go_on

ONE = Layout(1, 1, 1)
EP2 = Layout(1, 1, 2, expert_parallel=2)
LAYOUTS = [Layout(2, 1, 2, expert_parallel=2), Layout(1, 2, 2, expert_parallel=2)]
UPDATE = StepPlan(minibatches=2)
# Some of the stage's layers are run again in the backward pass, and others not.
RECOMPUTE = {"recompute": "full", "recompute_num_layers": 1}
REPLAYED = ModelSettings(torch.float32, sequence_parallel=True, recompute="full")
R2 = "old_log_probs"
FIGURES = ("changed_share", "max_load", "min_load")


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@dataclasses.dataclass(frozen=True)
class Step:
    """Results of a rank's step: the log-probs of the old pass, of the update's first minibatch and
    after the update, its figures, and the bytes of its routes."""

    old: TokenValues | None
    first: TokenValues | None
    minibatches: list[dict[str, float]]
    routing: dict[str, float]
    after: TokenValues | None
    route_bytes: int


def run(
    layout,
    platform,
    model,
    batch,
    replay,
    between="nothing",
    update=UPDATE,
    steps=1,
    lr=1e-3,
    **recompute,
):
    """The last of ``steps`` steps; ``between``: what happens between its passes."""
    settings = ModelSettings(torch.float32, sequence_parallel=True, **recompute)
    optimizer = {"lr": lr}
    actor = build(
        layout, platform, model, model=settings, routing_replay=replay, optimizer=optimizer
    )
    kept = 0
    for seed in range(steps):
        shard = actor.shard_of(batch, update, seed)
        with ties_broken(to_last=False):
            old = actor.shard_log_probs(shard, "old")
        count = int(shard.batch.response_lengths.sum())
        values = torch.zeros(count) if old is None else old.log_probs
        if actor.routing is not None:
            kept = sum(r.nbytes for one in actor.routing._routers for r in one.routes)
        with ties_broken(to_last=True) if between == "ties" else contextlib.nullcontext():
            if between == "routers":
                move_routers(actor)
            result = actor.update_shard(shard.with_values(old_log_probs=values), update)
    after = actor.log_probs(batch)
    assert actor.routing is None or not any(one.routes for one in actor.routing._routers)
    rows = response_rows(shard.places, batch.response_lengths)
    first = result.first
    if old is not None and first is not None:
        old = dataclasses.replace(old, response_rows=rows)
        first = dataclasses.replace(first, response_rows=rows[: len(first.log_probs)])
    if not actor.reports:
        old = first = None
    return Step(old, first, result.minibatches, result.routing, after, kept)


def move_routers(actor):
    """Other routes from weights that differ a little."""
    for module in actor.module.modules():
        if isinstance(module, TopKRouter):
            module.weight.data.add_(movement(int(module.layer_number) - 1))


def movement(layer):
    generator = torch.Generator().manual_seed(layer)
    return 0.05 * torch.randn(4, 64, generator=generator)


@contextlib.contextmanager
def ties_broken(to_last):
    """Let ``topk``, which may take any of equal scores, take the last ones or the first ones."""
    topk = torch.topk

    def choose(scores, k, dim=-1):
        order = scores.flip(dim) if to_last else scores
        indices = order.sort(dim=dim, descending=True, stable=True).indices.narrow(dim, 0, k)
        indices = scores.size(dim) - 1 - indices if to_last else indices
        return scores.gather(dim, indices), indices

    torch.topk = choose
    try:
        yield
    finally:
        torch.topk = topk


class Run:
    """:func:`run` with settings by name, to go to the ranks."""

    def __init__(self, **given):
        self.given = given

    def __call__(self, *args):
        return run(*args, **self.given)


def far(step):
    """Mean |difference| of log-probs between the old pass and the update's first pass."""
    count = len(step.first.log_probs)
    return float((step.old.log_probs[:count] - step.first.log_probs).abs().mean())


@pytest.fixture(scope="module")
def tied_experts(tmp_path_factory):
    """Pairs of experts that are equally good for every token: their routers' rows are equal.

    A token has three of four experts, so one of a pair.
    """
    from safetensors.torch import load_file, save_file

    folder = Path(make_mixture(tmp_path_factory.mktemp("ties"), num_experts_per_tok=3))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[1::2] = tensor[0::2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_routes_that_flip_cost_nothing(ranks, tied_experts, batch, recompute):
    """The weights are the same, so all that the log-probs differ by are the routes."""

    def step(replay):
        (found,) = ranks.run(ONE, Run(between="ties", **recompute), tied_experts, batch, replay)
        return found

    free, replayed = step("none"), step("old_log_probs")
    assert far(free) > 1e-3 and free.routing == {}
    assert far(replayed) == 0.0
    assert replayed.minibatches[0]["importance_ratio"] == 1.0
    assert replayed.routing["routing/changed_share"] > 0.5


def test_routing_replay_of_unchanged_routes_is_a_noop(ranks, mixture, batch):
    (free,) = ranks.run(ONE, Run(lr=1e-5, steps=2), mixture, batch, "none")
    measured = dataclasses.replace(UPDATE, routing_mismatch=True)
    job = Run(lr=1e-5, steps=2, update=measured)
    (replayed,) = ranks.run(ONE, job, mixture, batch, "old_log_probs")
    assert replayed.routing["routing/changed_share"] == 0.0
    # The last minibatch is the policy's after the first one's update.
    with_routes = replayed.routing["routing/mismatch"]
    assert with_routes == replayed.routing["routing/mismatch_without_replay"] > 0
    assert replayed.minibatches == free.minibatches
    assert torch.equal(replayed.after.log_probs, free.after.log_probs)


def with_routes_of(model, other, sequences):
    """Logits of ``model`` with the experts that ``other`` chooses, and a share for each."""
    topk, logits = torch.topk, []
    for tokens in sequences:
        routes = []

        def record(scores, k, dim=-1):
            found = topk(scores, k, dim=dim)
            routes.append(found[1])  # noqa: B023
            return found

        def replay(scores, k, dim=-1):
            indices = routes.pop(0)  # noqa: B023
            return scores.gather(dim, indices), indices

        with mock.patch("torch.topk", record), torch.no_grad():
            other(tokens[None])
        with mock.patch("torch.topk", replay):
            logits.append(model(tokens[None]).logits[0])
    return logits


def test_forward_and_gradient_are_those_of_the_old_routes(ranks, mixture, batch):
    """With routers that moved: against transformers in float64, its ``topk`` replayed by hand."""
    from transformers import AutoModelForCausalLM

    def load():
        return AutoModelForCausalLM.from_pretrained(
            mixture, dtype=torch.float64, experts_implementation="eager"
        )

    old, new = load(), load()
    for layer, block in enumerate(new.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.weight.data.add_(movement(layer))
    sequences = list(batch.tokens.split(batch.sequence_lengths.tolist()))

    def of_response(logits_of_all):
        pieces = []
        for prompt, tokens, logits in zip(
            batch.prompt_lengths.tolist(), sequences, logits_of_all, strict=True
        ):
            log_p = (logits[prompt - 1 : -1] / 0.7).log_softmax(-1)
            pieces.append(log_p.gather(1, tokens[prompt:, None]).squeeze(1))
        return torch.cat(pieces)

    log_p = of_response(with_routes_of(new, old, sequences))
    with torch.no_grad():
        own = of_response([new(tokens[None]).logits[0] for tokens in sequences])
    whole = StepPlan(minibatches=1, routing_mismatch=True)
    results = ranks.run(EP2, Run(between="routers", update=whole, **RECOMPUTE), mixture, batch, R2)
    before, first = (gather(batch, [getattr(r, n) for r in results]) for n in ("old", "first"))
    torch.testing.assert_close(first.log_probs.double(), log_p.detach(), atol=2e-5, rtol=0)
    ratio = (log_p - before.log_probs.double()).exp()
    advantages = batch.advantages.double()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = (policy * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in new.parameters() if p.grad is not None))
    for one in results:
        assert one.minibatches[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert one.minibatches[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert one.routing == results[0].routing
        assert 0.05 < one.routing["routing/changed_share"] < 0.9
    for name, values in (("mismatch", log_p.detach()), ("mismatch_without_replay", own)):
        apart = (values - before.log_probs.double()).abs()[batch.loss_mask].mean()
        assert results[0].routing[f"routing/{name}"] == pytest.approx(float(apart), abs=2e-6)
    without = results[0].routing["routing/mismatch_without_replay"]
    assert without > 1.2 * results[0].routing["routing/mismatch"] > 0


@pytest.fixture(scope="module")
def on_one_rank(ranks, mixture, batch):
    (found,) = ranks.run(ONE, Run(steps=2, between="routers"), mixture, batch, R2)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_routing_replay_is_equal_on_layouts(ranks, mixture, batch, on_one_rank, layout):
    """The second step of two, with layers that are run again in the backward pass."""
    job = Run(steps=2, between="routers", **RECOMPUTE)
    results = ranks.run(layout, job, mixture, batch, R2)
    for one in results:
        for figures, expected in zip(one.minibatches, on_one_rank.minibatches, strict=True):
            assert figures == pytest.approx(expected, rel=5e-5, abs=5e-6)
        assert one.routing == pytest.approx(on_one_rank.routing, abs=0.01)
    after = gather(batch, [one.after for one in results])
    torch.testing.assert_close(
        after.log_probs, gather(batch, [on_one_rank.after]).log_probs, atol=2e-4, rtol=0
    )


def run_and_save(layout, platform, model, batch, folder):
    """Step 1, a checkpoint, and steps 2 and 3 in the same process."""
    actor = build(layout, platform, model, routing_replay=R2, model=REPLAYED)
    replayed_steps(actor, batch, [1])
    save_model(actor, folder)
    routing = replayed_steps(actor, batch, [2, 3])
    return go_on(actor, batch, 0), routing


def run_from_checkpoint(layout, platform, model, batch, folder):
    """Steps 2 and 3 of a new actor, as after the old one was killed."""
    actor = build(layout, platform, model, routing_replay=R2, model=REPLAYED)
    load_model(actor, folder)
    routing = replayed_steps(actor, batch, [2, 3])
    return go_on(actor, batch, 0), routing


def replayed_steps(actor, batch, seeds):
    """Steps of two minibatches, of which the second replays routes that it would not choose."""
    for seed in seeds:
        shard = actor.shard_of(batch, UPDATE, seed)
        old = actor.shard_log_probs(shard, "old")
        values = torch.zeros(int(shard.batch.response_lengths.sum()))
        values = values if old is None else old.log_probs
        found = actor.update_shard(shard.with_values(old_log_probs=values), UPDATE)
        assert found.routing["routing/changed_share"] > 0
    return found.routing


def test_a_resumed_run_is_the_one_that_never_stopped(ranks, mixture, batch, tmp_path):
    """Bit for bit, on ranks that share experts: no step needs the routes of one before it."""
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(EP2, run_and_save, mixture, batch, partial)
    )
    resumed = ranks.run(EP2, run_from_checkpoint, mixture, batch, folder)
    for (one, routing), (other, other_routing) in zip(straight, resumed, strict=True):
        assert_equal(one, other)
        assert routing == other_routing
        if one.values is not None:
            assert torch.equal(one.values.log_probs, other.values.log_probs)


def test_routing_metrics_and_bytes(on_one_rank, batch):
    routing = on_one_rank.routing
    moe = (0, 2, 3)  # Layer 1 is dense.
    names = {f"routing/{name}/layer_{n}" for n in moe for name in FIGURES}
    assert set(routing) == names | {"routing/changed_share"}
    share = sum(routing[f"routing/changed_share/layer_{n}"] for n in moe) / len(moe)
    assert routing["routing/changed_share"] == pytest.approx(share)
    assert all(routing[f"routing/max_load/layer_{n}"] >= 1 for n in moe)
    assert all(0 <= routing[f"routing/min_load/layer_{n}"] <= 1 for n in moe)
    # A byte per token, MoE layer and expert of a token; rows need no padding on one rank.
    assert on_one_rank.route_bytes == int(batch.sequence_lengths.sum()) * 3 * 2


def run_wrong_order(layout, platform, model, batch):
    """Error of updates without the routes of their shard's own pass."""
    actor = build(layout, platform, model, routing_replay=R2)
    said = []

    def update(shard):
        values = torch.zeros(int(shard.batch.response_lengths.sum()))
        with pytest.raises(ValueError) as error:
            actor.update_shard(shard.with_values(old_log_probs=values), UPDATE)
        said.append(str(error.value))

    shards = [actor.shard_of(batch, UPDATE, seed) for seed in (0, 1)]
    update(shards[0])
    actor.shard_log_probs(shards[0], "old")
    update(shards[1])
    # The reference and the noise of the gate are passes over the same shard.
    actor.shard_log_probs(shards[0], "noise", 1)
    actor.update_shard(
        shards[0].with_values(old_log_probs=torch.zeros(batch.loss_mask.numel())), UPDATE
    )
    update(shards[0])
    return said


def test_an_update_without_routes_is_refused(ranks, mixture, batch):
    (said,) = ranks.run(ONE, run_wrong_order, mixture, batch)
    assert len(said) == 3
    assert all("actor.routing_replay" in one and "no routes for this shard" in one for one in said)
