"""Each loss and each aggregation gives the same loss and gradient however the batch is cut.

On real gloo ranks, in float32. The learning rate is 0, so that all combinations see one model; each
run cuts the batch into two optimizer minibatches.
"""

import itertools

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.losses import LOSSES
from rlmath.algorithms.losses.clip import ClipOptions
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching import minibatches
from rlmath.model.parallel import Layout
from tests.support.actors import LAYOUTS, build, make_batch, on_layouts, with_log_probs

ALL = [(loss, kind) for loss in LOSSES.names() for kind in AGGREGATIONS.names()]
# An aggregation makes weights of tokens before any loss is computed, so a few pairs have all that
# could differ: each loss once, and each aggregation. The long tests have all pairs.
FEW = list(zip(LOSSES.names(), itertools.cycle(AGGREGATIONS.names()), strict=False))
# Where a gradient is nearly 0, or a loss is a small difference of terms of size 1, a rounding or
# two of those terms is left.
RELATIVE, ABSOLUTE = 1e-5, 3e-7


def settings(combination, minibatches):
    loss, kind = combination
    # A narrow clip, so that tokens are clipped on both sides.
    clips = issubclass(LOSSES.options(loss), ClipOptions)
    options = LOSSES.options(loss)(**({"clip_low": 0.05, "clip_high": 0.08} if clips else {}))
    return StepPlan(
        objective=ObjectiveSettings(loss=loss, options=options, kl_coef=0.1),
        aggregation=kind,
        constant_length=30,
        minibatches=minibatches,
    )


def run(layout, platform, model, batch, minibatches, max_tokens_per_microbatch, combinations):
    """Metrics of each minibatch under each combination, from one actor."""
    actor = build(
        layout,
        platform,
        model,
        optimizer={"lr": 0.0},
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )
    return {
        combination: actor.update(batch, settings(combination, minibatches), seed=0).minibatches
        for combination in combinations
    }


@pytest.fixture(scope="module")
def alone(ranks, tiny_model):
    batch = with_log_probs(make_batch())
    (found,) = ranks.run(Layout(1, 1, 1), run, tiny_model, batch, 2, 64, FEW)
    return batch, found


def check(found, expected):
    for combination in expected:
        for one, reference in zip(found[combination], expected[combination], strict=True):
            assert reference["grad_norm"] > 0
            assert one == pytest.approx(reference, rel=RELATIVE, abs=ABSOLUTE), combination


@on_layouts(first=1)
def test_losses_are_invariant_over_layouts(ranks, tiny_model, alone, layout):
    batch, expected = alone
    for found in ranks.run(layout, run, tiny_model, batch, 2, 64, FEW):
        check(found, expected)


@pytest.mark.long
def test_all_pairs_over_layouts(ranks, tiny_model):
    batch = with_log_probs(make_batch())
    (expected,) = ranks.run(Layout(1, 1, 1), run, tiny_model, batch, 2, 64, ALL)
    for layout in LAYOUTS[1:]:
        for found in ranks.run(layout, run, tiny_model, batch, 2, 64, ALL):
            check(found, expected)


def check_minibatches(batch, in_two, in_one):
    """Without a learning rate, two minibatches' losses are parts of one mean."""
    shares = [batch.select(m) for m in minibatches(batch.group_ids.tolist(), 2, 0)]
    for loss, kind in in_one:
        counts = [denominator(kind, share) for share in shares]
        losses = [one["loss"] for one in in_two[loss, kind]]
        mean = sum(n * x for n, x in zip(counts, losses, strict=True)) / sum(counts)
        (whole,) = in_one[loss, kind]
        assert mean == pytest.approx(whole["loss"], rel=RELATIVE, abs=ABSOLUTE), (loss, kind)


def denominator(kind, share):
    """Number of tokens, sequences or prompts of the loss that the aggregation averages over."""
    sequences = [
        group
        for group, mask in zip(
            share.group_ids.tolist(),
            share.loss_mask.split(share.response_lengths.tolist()),
            strict=True,
        )
        if mask.any()
    ]
    return {"token_mean": int(share.loss_mask.sum()), "prompt_mean": len(set(sequences))}.get(
        kind, len(sequences)
    )


def test_over_minibatches_micro_batches_and_the_order_of_samples(ranks, tiny_model, alone):
    batch, in_two = alone
    (expected,) = ranks.run(Layout(1, 1, 1), run, tiny_model, batch, 1, 64, FEW)
    check_minibatches(batch, in_two, expected)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    # All in one micro-batch, and each sequence nearly alone on two ranks.
    (found,) = ranks.run(Layout(1, 1, 1), run, tiny_model, batch.select(order), 1, 1000, FEW)
    check(found, expected)
    for found in ranks.run(Layout(1, 1, 2), run, tiny_model, batch.select(order), 1, 40, FEW):
        check(found, expected)
