"""Several chunks of the model on each pipeline stage: what they compute and save is that of one."""

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.model.parallel import Layout
from rlmath.validation.hooks import megatron_values
from rlmath.weights.gather import BucketGatherer
from tests.distributed import test_actor, test_lora, test_mixture, test_routing_replay
from tests.distributed import test_value_model as values
from tests.distributed.test_actor import check_updates
from tests.support.actors import make_batch
from tests.support.models import make_model
from tests.support.resumed_runs import (
    assert_close,
    assert_equal,
    changes_of,
    commit,
    run_load,
    run_save,
)

# Fixtures.
on_one_rank = test_actor.on_one_rank
batch = values.batch

ONE, PP2 = Layout(1, 1, 1), Layout(1, 2, 1)
VP2 = Layout(1, 2, 1, virtual_stages=2)
MODEL = ModelSettings(torch.float32, sequence_parallel=True, recompute="full")


@pytest.fixture(scope="module")
def seven_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seven")
    return make_model(folder, tied=False, num_hidden_layers=7)


@pytest.fixture(scope="module")
def seven_on_one_rank(ranks, seven_layers):
    return test_actor.updates_on_one_rank(ranks, seven_layers)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        # Chunks of 2, 2, 2 and 1 layers.
        pytest.param(VP2, {}, marks=pytest.mark.long),
        # Chunks of 1, 2, 1, 1, 1 and 1, some of which recompute fewer layers than others.
        (Layout(1, 3, 1, virtual_stages=2), {"model": MODEL}),
        # Chunks of one layer but for the first.
        pytest.param(Layout(1, 2, 1, virtual_stages=3), {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_seven_layers_in_chunks_that_differ(
    ranks, seven_layers, seven_on_one_rank, layout, changes
):
    check_updates(ranks, seven_layers, seven_on_one_rank, layout, changes)
    (expected,) = ranks.run(ONE, run_fingerprints, seven_layers)
    assert all(one == expected for one in ranks.run(layout, run_fingerprints, seven_layers))


def run_fingerprints(layout, platform, model):
    actor = values.build_policy(layout, platform, model)
    assert len(actor.chunks) == layout.virtual_stages
    return BucketGatherer(actor.chunks, actor.spec, actor.parallel).fingerprints()


def run_values(layout, platform, model):
    return megatron_values(values.build_policy(layout, platform, model), list(range(3, 20)))


def test_layers_are_found_where_values_part(ranks, tiny_model):
    """find_divergence compares every layer of every chunk, by its number in the model."""
    (expected,) = ranks.run(ONE, run_values, tiny_model)
    found, _ = ranks.run(VP2, run_values, tiny_model)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=2e-5, rtol=1e-4)


def test_a_checkpoint_resumes_bit_by_bit_and_in_other_layouts(ranks, tiny_model, tmp_path):
    changes = changes_of(True)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(VP2, run_save, tiny_model, changes, partial, 1, 1)
    )
    again = ranks.run(VP2, run_load, tiny_model, changes, folder, 1)
    for one, other in zip(straight, again, strict=True):
        assert_equal(one, other)
    for layout in (ONE, PP2):
        for one in ranks.run(layout, run_load, tiny_model, changes, folder, 1):
            assert_close(one, straight[0])
    straight, folder = commit(
        tmp_path / "one",
        lambda partial: ranks.run(ONE, run_save, tiny_model, changes, partial, 1, 1),
    )
    for one in ranks.run(VP2, run_load, tiny_model, changes, folder, 1):
        assert_close(one, straight[0])


def test_a_mixture_with_routes_replayed(ranks, tmp_path):
    """The dense layer is the second of four, so chunks differ; layers run again in the backward."""
    model, batch = test_mixture.make_mixture(tmp_path), make_batch()
    job = test_routing_replay.Run(steps=2, between="routers", recompute="full")
    layout = Layout(1, 2, 2, expert_parallel=2, virtual_stages=2)
    (alone,) = ranks.run(ONE, job, model, batch, test_routing_replay.R2)
    for one in ranks.run(layout, job, model, batch, test_routing_replay.R2):
        for figures, wanted in zip(one.minibatches, alone.minibatches, strict=True):
            assert figures == pytest.approx(wanted, rel=5e-5, abs=5e-6)
        assert one.routing == pytest.approx(alone.routing, abs=0.01)


def test_adapters_on_virtual_stages(ranks, tiny_model, tmp_path):
    lora = test_lora.write_peft(tmp_path / "all", tiny_model, test_lora.ALL)
    expected = test_lora.expectation(tiny_model, lora)
    test_lora.check(ranks, tiny_model, lora, expected, VP2, test_lora.PLAIN_OPTIMIZER)


def test_a_value_model_and_its_checkpoint(ranks, tiny_model, tmp_path, batch):
    ((expected, *alone),) = ranks.run(ONE, values.run, tiny_model, batch, None)
    results = ranks.run(VP2, values.run, tiny_model, batch, str(tmp_path))
    total = batch.loss_mask.numel()
    torch.testing.assert_close(
        values.together(results, total),
        values.together([(expected, *alone)], total),
        atol=2e-5,
        rtol=0,
    )
    for _, *steps in results:
        for step, expected_step in zip(steps, alone, strict=True):
            for figures, wanted in zip(step, expected_step, strict=True):
                assert figures == pytest.approx(wanted, rel=1e-4, abs=1e-5)
