"""``actor.recompute=selective`` on gloo ranks: what is computed again is what would have been kept.

Bit by bit: the same operators run on the same numbers.
"""

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from tests.distributed import test_routing_replay
from tests.distributed.kept_activations import equal_sequences, kept_bytes
from tests.support.actors import UPDATE, build, make_batch, with_log_probs
from tests.support.models import make_glm, make_hybrid, make_mixture

ONE = Layout(1, 1, 1)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return make_glm(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return make_hybrid(tmp_path_factory.mktemp("hybrid"))


def state_of(actor):
    """Weights, gradients' norms are in the metrics, and Adam's moments."""
    found = {name: p.detach().clone() for name, p in actor.module.named_parameters()}
    for number, part in enumerate(optimizer_parts(actor.optimizer)):
        for place, state in enumerate(part.optimizer.state.values()):
            found |= {f"{number}.{place} {key}": value.clone() for key, value in state.items()}
    return found


def run(layout, platform, model, batch, modules, lora):
    """Two updates with and without; what differs on this rank."""

    def updates(**recompute):
        settings = ModelSettings(torch.float32, sequence_parallel=True, **recompute)
        actor = build(layout, platform, model, model=settings, lora=lora)
        metrics = [actor.update(batch, UPDATE, seed=seed).minibatches for seed in range(2)]
        return repr(metrics), state_of(actor)

    metrics, state = updates()
    found, other = updates(recompute="selective", recompute_modules=modules)
    different = [key for key, value in state.items() if not value.equal(other[key])]
    return different + ([] if metrics == found else ["metrics"])


@pytest.mark.parametrize(
    ("model", "layout", "modules", "lora"),
    [
        # The next one with tensor ranks in the place of stages and context ranks.
        pytest.param(
            "tiny_model", Layout(2, 1, 2), ("core_attn", "mlp"), None, marks=pytest.mark.long
        ),
        (
            "tiny_model",
            Layout(1, 2, 1, context_parallel=2, pipeline_layers=(1, 3)),
            ("core_attn", "mlp"),
            None,
        ),
        # The one before with more chunks; test_virtual_stages.py recomputes some of theirs.
        pytest.param(
            "tiny_model", Layout(1, 2, 1, virtual_stages=2), ("mlp",), None, marks=pytest.mark.long
        ),
        ("mixture", Layout(2, 1, 2, expert_parallel=4), ("mlp", "moe"), None),
        ("glm", ONE, ("shared_experts",), None),
        ("hybrid", Layout(2, 1, 1), ("core_attn", "moe"), None),
        # The input of the first layer's feed-forward needs no gradient: all before it is frozen.
        ("tiny_model", ONE, ("mlp",), Lora(rank=2, alpha=4.0, targets=("up_proj",), layers=(0,))),
    ],
    ids=str,
)
def test_updates_are_the_same_to_the_last_bit(ranks, request, model, layout, modules, lora):
    batch = with_log_probs(make_batch())
    folder = request.getfixturevalue(model)
    for different in ranks.run(layout, run, folder, batch, modules, lora):
        assert different == []


def test_replayed_routes_are_those_of_the_forward_pass(ranks, tmp_path):
    """A recomputed router runs twice for a micro-batch, and takes its route both times."""
    model, batch, layout = make_mixture(tmp_path), make_batch(), Layout(1, 2, 2, expert_parallel=2)
    plain = test_routing_replay.Run(between="routers")
    again = test_routing_replay.Run(
        between="routers", recompute="selective", recompute_modules=("moe",)
    )
    replay = test_routing_replay.R2
    expected = ranks.run(layout, plain, model, batch, replay)
    for one, other in zip(ranks.run(layout, again, model, batch, replay), expected, strict=True):
        assert (one.minibatches, one.routing) == (other.minibatches, other.routing)


@pytest.mark.parametrize("modules", [("mlp",), ("core_attn",)], ids=str)
def test_as_much_less_is_kept_as_a_plan_counts(ranks, tiny_model, modules):
    """By autograd and by ``rlmath plan layout``; attention pads nothing here."""
    from rlmath.commands.plan.activations import layer_bytes, whole_layer_bytes
    from rlmath.commands.plan.actor_shape import ActorShape
    from rlmath.model.spec import read_model_spec

    batch = equal_sequences(6, prompt=8, response=24)
    (kept,) = ranks.run(ONE, kept_bytes, tiny_model, batch, 0)
    (less,) = ranks.run(ONE, kept_bytes, tiny_model, batch, 0, modules)
    spec = read_model_spec(tiny_model)
    actor = ActorShape(ONE, 0, 1, "local", recompute_modules=modules)
    saved = whole_layer_bytes(spec, actor) - layer_bytes(spec, actor)
    # The plan counts activations in bfloat16, and the denominators of attention in float32.
    size = 1 if modules == ("core_attn",) else 2
    assert (kept - less) / spec.layers / (6 * 32) == pytest.approx(size * saved, rel=0.03)
