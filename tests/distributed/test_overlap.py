"""``actor.overlap_gradients`` on gloo ranks: sums in the backward pass are those after it.

Buckets hold a few thousand elements here, so that there are many of them.
"""

import functools
from unittest import mock

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from tests.support.actors import UPDATE, build, make_batch, with_log_probs
from tests.support.resumed_runs import assert_equal, changes_of, commit, run_load, run_save

BUCKET_ELEMENTS = 4000


def in_small_buckets():
    from megatron.core.distributed import DistributedDataParallelConfig

    small = functools.partial(DistributedDataParallelConfig, bucket_size=BUCKET_ELEMENTS)
    return mock.patch("megatron.core.distributed.DistributedDataParallelConfig", small)


def run(layout, platform, model, batch, changes):
    """Two updates with and without: weights that differ on this rank, metrics, and buckets."""
    # Shares of small buckets are other parts of the parameters, so that the norm of the gradient
    # is rounded in another way: nothing is clipped by it here.
    optimizer = {"clip_grad_norm": 1e9, **changes.get("optimizer", {})}

    def updates(overlap):
        settings = ModelSettings(torch.float32, sequence_parallel=True, logits="chunked")
        given = {"model": settings, **changes, "optimizer": dict(optimizer)}
        with in_small_buckets():
            actor = build(layout, platform, model, overlap_gradients=overlap, **given)
        metrics = [one for seed in (0, 1) for one in actor.update(batch, UPDATE, seed).minibatches]
        return actor, metrics

    alone, metrics = updates(False)
    actor, found = updates(True)
    pairs = zip(alone.module.named_parameters(), actor.module.parameters(), strict=True)
    different = [name for (name, one), other in pairs if not one.equal(other)]
    buckets = sum(len(buffer.buckets) for one in actor.models for buffer in one.buffers)
    return different, [metrics, found], buckets


PLAIN = {"optimizer": {"distributed": False}}
LORA = {"lora": Lora(rank=16, alpha=4.0, targets=("q_proj", "up_proj"))}


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [
        ("untied", Layout(2, 1, 2), {}),
        # In the last stage's copy of the table the output layer alone has a gradient.
        ("tied", Layout(1, 2, 2, virtual_stages=2), {}),
        # Context ranks with it: test_gradients.py.
        pytest.param("untied", Layout(1, 1, 1, context_parallel=2), PLAIN, marks=pytest.mark.long),
        ("mixture", Layout(1, 1, 2, expert_parallel=2), {}),
        ("untied", Layout(1, 1, 2), LORA),
    ],
    ids=str,
)
def test_weights_are_the_same_to_the_last_bit(ranks, models, model, layout, changes):
    batch = with_log_probs(make_batch())
    for different, (metrics, found), buckets in ranks.run(
        layout, run, models[model], batch, changes
    ):
        assert different == []
        assert buckets > 2
        for one, other in zip(metrics, found, strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-7)


def save_small(*given):
    with in_small_buckets():
        return run_save(*given)


def load_small(*given):
    with in_small_buckets():
        return run_load(*given)


def test_a_checkpoint_of_many_buckets_resumes_bit_by_bit_and_in_one_bucket(ranks, models, tmp_path):
    layout, changes = Layout(2, 1, 2), changes_of(True)
    overlapped = {**changes, "overlap_gradients": True}
    straight, folder = commit(
        tmp_path,
        lambda partial: ranks.run(layout, save_small, models["untied"], overlapped, partial, 1, 1),
    )
    again = ranks.run(layout, load_small, models["untied"], overlapped, folder, 1)
    for one, other in zip(straight, again, strict=True):
        assert_equal(one, other)
    for one in ranks.run(Layout(1, 1, 1), run_load, models["untied"], changes, folder, 1):
        for metrics, wanted in zip(one.metrics, straight[0].metrics, strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)
