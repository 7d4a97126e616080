"""Gradients have fingerprints by tensor, the same on any layout, of each element once."""

import pytest
import torch

from rlmath.actor.value import ValueModel
from rlmath.model.parallel import Layout
from rlmath.weights.fingerprint import add
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.quantized_prints import sent_fingerprints
from rlmath.weights.slices import Rotation
from tests.distributed.test_lora import ALL
from tests.support.actors import UPDATE, build, make_batch, with_log_probs
from tests.support.models import make_mixture


def run(layout, platform, model, distributed):
    """Fingerprints of weights as they are sent, as they are counted here, and of gradients equal to
    the weights where a rank has reduced them, and nonsense elsewhere."""
    actor = build(layout, platform, model, optimizer={"distributed": distributed})
    gatherer = BucketGatherer(actor.chunks, actor.spec, actor.parallel)
    sent = gatherer.fingerprints()
    _check_slices(gatherer, sent)
    prints = actor.tensor_prints()
    prints.add_weights()
    weights = prints.take()
    _put_weights_as_gradients(actor)
    prints.add_gradient(0)
    gradients = prints.take()
    assert prints.take() == dict.fromkeys(prints.names, 0)
    return sent, weights, gradients


def _check_slices(gatherer, sent):
    """Check that slices of a round add up, as engines hold them as sent and in FP8."""
    shapes = {meta.name: meta.shape for meta in gatherer.tensors}
    whole = frozenset(name for name in shapes if ".experts." in name)
    for packed in (True, False):
        rotation = Rotation(shapes, packed=packed, whole=whole)
        total = {}
        quantized = {}
        while not total or not rotation.is_at_start:
            part, _ = rotation.pop(rotation.work / 5)
            found = gatherer.fingerprints(part)
            assert found.keys() == part.keys()
            for name, value in found.items():
                total[name] = add(total.get(name, 0), value)
            if not packed:
                quantized |= sent_fingerprints(gatherer, part)
        assert total == sent
    assert quantized == sent_fingerprints(gatherer)


def _put_weights_as_gradients(actor):
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    for parameter in actor.module.parameters():
        for part in parts:
            if parameter not in getattr(part, "model_param_gbuf_map", ()):
                continue
            own = part._get_model_param_range_map(parameter)["param"]
            values = parameter.detach().reshape(-1)
            parameter.main_grad.fill_(float("nan"))
            parameter.main_grad.view(-1)[own.start : own.end] = values[own.start : own.end]
            break
        else:
            parameter.main_grad.copy_(parameter.detach())


@pytest.mark.parametrize(
    ("layout", "distributed"), [(Layout(2, 1, 2), True), (Layout(1, 2, 2), False)], ids=str
)
def test_tensor_prints_of_a_dense_model(layout, distributed, ranks, tiny_model):
    check(ranks, layout, tiny_model, distributed)


def test_tensor_prints_of_moe(ranks, tmp_path):
    """Experts are reduced by other ranks than the rest."""
    model = make_mixture(tmp_path)
    for layout in (Layout(2, 1, 2, expert_parallel=4), Layout(2, 1, 2, expert_parallel=2)):
        check(ranks, layout, model, True)


def check(ranks, layout, model, distributed):
    for sent, weights, gradients in ranks.run(layout, run, model, distributed):
        assert weights == gradients == dict(sorted(sent.items()))
        assert len(sent) > 40 and len(set(sent.values())) > 30


def run_updates(layout, platform, model):
    """Prints of an update, twice from the same weights; with adapters; and of a value model."""
    batch = with_log_probs(make_batch())
    found = [
        build(layout, platform, model).update(batch, UPDATE, seed).gradients for seed in (0, 0, 1)
    ]
    adapted = build(layout, platform, model, lora=ALL).update(batch, UPDATE, 0)
    actor = build(layout, platform, model)
    value_model = ValueModel(actor.settings, layout, platform)
    values = [value_model.weight_prints()]
    with torch.no_grad():
        for chunk in value_model.chunks:
            if chunk.post_process:
                chunk.output_layer.bias += 1
    values.append(value_model.weight_prints())
    return found, adapted.gradients, values


def test_updates_report_tensor_prints(ranks, tiny_model):
    for (first, again, other), adapted, (before, after) in ranks.run(
        Layout(2, 1, 1), run_updates, tiny_model
    ):
        assert first == again and first.keys() == other.keys()
        # Another seed shards the sequences into other minibatches.
        assert sum(first[name] != other[name] for name in first) > 0.9 * len(first)
        assert all("lora_" in name for name in adapted) and any(adapted.values())
        assert {"value_head.weight", "value_head.bias"} <= before.keys()
        assert "lm_head.weight" not in before
        assert [n for n in before if before[n] != after[n]] == ["value_head.bias"]
