"""The actor on real gloo ranks: right against Hugging Face, and the same on every layout."""

import contextlib
import dataclasses
import math
from unittest import mock

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.correction import CorrectionConfig, correct
from rlmath.algorithms.kl import K3_LIMIT
from rlmath.model.parallel import Layout
from tests.support.actors import (
    UPDATE,
    build,
    gather,
    hugging_face,
    in_float64,
    make_batch,
    on_layouts,
    run_log_probs,
    run_updates,
    with_log_probs,
)


def run_noise(layout, platform, model, batch, logits):
    """Log-probs: as usual, with another rounding, with the same again, and as usual."""
    settings = ModelSettings(torch.float32, sequence_parallel=True, logits=logits)
    actor = build(layout, platform, model, model=settings)
    passes = (("policy", 0), ("noise", 5), ("noise", 5), ("policy", 0))
    return [actor.log_probs(batch, name, seed) for name, seed in passes]


@on_layouts()
def test_log_probs_and_entropy_are_those_of_hugging_face(ranks, tiny_model, layout):
    batch = make_batch()
    ours = gather(batch, ranks.run(layout, run_log_probs, tiny_model, batch))
    theirs = hugging_face(tiny_model, batch, temperature=0.7)
    torch.testing.assert_close(ours.log_probs.double(), theirs.log_probs, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours.entropy.double(), theirs.entropy, atol=2e-5, rtol=0)


# Rules over whole sequences: the mask against old mistakes, and weights against the mismatch.
CORRECTED = dataclasses.replace(
    UPDATE, objective=dataclasses.replace(UPDATE.objective, off_policy_mask_kl=0.05)
)


def with_corrections(batch):
    assert batch.old_log_probs is not None
    settings = CorrectionConfig("seq_truncate", high=1.2, veto_below=0.75)
    found = correct(
        batch.old_log_probs,
        batch.engine_log_probs,
        batch.loss_mask,
        batch.response_lengths,
        settings,
    )
    done = found.totals.metrics()
    assert 0 < done["vetoed_sequences"] < 1 and done["truncated_tokens"] > 0
    versions = torch.arange(len(batch)) % 3
    return dataclasses.replace(batch, policy_factors=found.weights, weights_versions=versions)


def tokens_of(batch, version):
    """``[R]`` bool, tokens that a version of the weights sampled."""
    return torch.repeat_interleave(batch.weights_versions, batch.response_lengths) == version


@pytest.fixture(scope="module")
def on_one_rank(ranks, tiny_model):
    """Metrics and log-probs after three updates on a single rank."""
    return updates_on_one_rank(ranks, tiny_model)


@pytest.fixture(scope="module")
def updates_of_tied_model(ranks, tied_model):
    return updates_on_one_rank(ranks, tied_model)


def updates_on_one_rank(ranks, model):
    batch = with_corrections(with_log_probs(make_batch()))
    ((metrics, _, values),) = ranks.run(
        Layout(1, 1, 1), run_updates, model, batch, CORRECTED, 3, {}
    )
    assert any(0 < one["off_policy_masked"] < 1 for one in metrics)
    for last in range(CORRECTED.minibatches - 1, len(metrics), CORRECTED.minibatches):
        own = metrics[last + 1 - CORRECTED.minibatches : last + 1]
        masked = sum(one["off_policy_masked"] * one["token_count"] for one in own)
        assert sum(metrics[last][f"masked_of_{v}"] for v in range(3)) == pytest.approx(masked)
        of_versions = [metrics[last][f"tokens_of_{v}"] for v in range(3)]
        assert of_versions == [int(batch.loss_mask[tokens_of(batch, v)].sum()) for v in range(3)]
    return batch, metrics, gather(batch, [values])


@on_layouts(first=1)
def test_the_update_does_not_depend_on_the_layout(ranks, tiny_model, on_one_rank, layout):
    check_updates(ranks, tiny_model, on_one_rank, layout, {})


def check_updates(ranks, tiny_model, on_one_rank, layout, changes, run=run_updates):
    batch, expected, expected_values = on_one_rank
    results = ranks.run(layout, run, tiny_model, batch, CORRECTED, 3, changes)
    for metrics, _, _ in results:
        assert len(metrics) == 6
        for one, reference in zip(metrics, expected, strict=True):
            assert one.keys() == reference.keys()
            for name in one:
                assert one[name] == pytest.approx(reference[name], rel=2e-5, abs=2e-6), name
    values = gather(batch, [v for _, _, v in results])
    torch.testing.assert_close(values.log_probs, expected_values.log_probs, atol=1e-4, rtol=0)


def run_chunked(*given):
    """:func:`run_updates` with the output layer in chunks of 7 rows, their softmax in parts of 3,
    the weight in blocks of 10."""
    with contextlib.ExitStack() as stack:
        for name, count in (
            ("head.rows_per_chunk", 7),
            ("softmax_tables.rows_per_table", 3),
            ("head.weight_rows_per_block", 10),
        ):
            function = mock.Mock(return_value=count)
            stack.enter_context(mock.patch(f"rlmath.actor.{name}", function))
        return run_updates(*given)


CHUNKED = {"model": ModelSettings(torch.float32, sequence_parallel=True, logits="chunked")}


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1, 1), Layout(1, 2, 1, context_parallel=2, pipeline_layers=(1, 3))],
    ids=str,
)
def test_the_update_is_that_of_whole_logits(ranks, tiny_model, on_one_rank, layout):
    check_updates(ranks, tiny_model, on_one_rank, layout, CHUNKED, run_chunked)


@pytest.mark.parametrize("layout", [Layout(1, 1, 1), Layout(1, 2, 1), Layout(2, 1, 1)], ids=str)
def test_the_update_of_a_tied_model_is_that_of_whole_logits(
    ranks, tied_model, updates_of_tied_model, layout
):
    """On one stage the weight's gradient meets that of the embedding, on two their copies' is
    added up; here tensor ranks have all rows."""
    settings = dataclasses.replace(CHUNKED["model"], sequence_parallel=False)
    check_updates(
        ranks, tied_model, updates_of_tied_model, layout, {"model": settings}, run_chunked
    )


def test_the_gradients_norm_is_that_of_autograd_on_hugging_face(ranks, tiny_model):
    """Clipped loss, KL and entropy terms, by hand on the HF model."""
    batch = with_log_probs(make_batch())
    one_minibatch = StepPlan(objective=UPDATE.objective, minibatches=1)
    metrics, _, _ = ranks.run(
        Layout(2, 1, 1), run_updates, tiny_model, batch, one_minibatch, 1, {}
    )[0]

    hf, log_p, entropy = in_float64(tiny_model, batch)
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    ratio = (log_p - batch.old_log_probs.double()).exp()
    a = batch.advantages.double()
    policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    difference = batch.ref_log_probs.double() - log_p
    # Some tokens are beyond k3's bound, and have no gradient of it.
    kl = (difference.exp() - difference - 1).clamp(max=K3_LIMIT)
    mask = batch.loss_mask
    loss = ((policy + 0.1 * kl - 0.01 * entropy) * mask).sum() / mask.sum()
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in hf.parameters() if p.grad is not None))
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "logits"),
    [(Layout(1, 1, 1), "whole"), (Layout(2, 1, 2), "chunked"), (Layout(1, 2, 1), "whole")],
    ids=str,
)
def test_another_rounding_is_small_repeats_and_leaves_nothing(ranks, tiny_model, layout, logits):
    batch = make_batch()
    by_rank = ranks.run(layout, run_noise, tiny_model, batch, logits)
    usual, noisy, again, after = (
        gather(batch, list(one)).log_probs for one in zip(*by_rank, strict=True)
    )
    assert torch.equal(usual, after) and torch.equal(noisy, again)
    difference = (noisy - usual).abs()
    # A few units in the last place of float32, at nearly every token.
    assert 1e-7 < float(difference.max()) < 1e-4
    assert float((difference > 0).float().mean()) > 0.5


def adam_state(optimizer):
    """Moments, steps and main parameters of this rank, in the order of the parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found = []
    for part in parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter.detach().clone()]
                found += [torch.as_tensor(state[name]).clone() for name in sorted(state)]
    return found


def run_planted(layout, platform, model, batch, plant):
    """Update, a minibatch with huge ratios if asked, update: parameters and optimizer state."""
    actor = build(layout, platform, model)
    update = StepPlan(minibatches=1, early_stop_ratio=5.0)
    actor.update(batch, update, seed=0)
    discarded = {}
    if plant:
        bad = dataclasses.replace(batch, old_log_probs=batch.old_log_probs - 5.0)
        discarded = actor.update(bad, update, seed=1).early_stopped
        nan = batch.advantages.clone()
        nan[batch.loss_mask.nonzero()[0]] = torch.nan
        discarded[1] = actor.update(
            dataclasses.replace(batch, advantages=nan), update, seed=1
        ).early_stopped[0]
    actor.update(batch, update, seed=2)
    weights = {n: p.detach().clone() for n, p in actor.module.named_parameters()}
    return weights, adam_state(actor.optimizer), discarded


def run_with_and_without(layout, platform, model, batch):
    return [run_planted(layout, platform, model, batch, plant) for plant in (True, False)]


def run_far(layout, platform, model, batch):
    return build(layout, platform, model).update(batch, StepPlan(), seed=0)


def test_a_token_far_from_the_old_policy_is_named_on_all_ranks_and_the_rest_trained_on(
    ranks, tiny_model
):
    batch = with_log_probs(make_batch())
    old, rows = batch.old_log_probs.clone(), batch.loss_mask.nonzero().flatten()
    near, far = int(rows[3]), int(rows[-2])
    old[near] -= 25.0
    old[far] -= 2e4
    for result in ranks.run(
        Layout(1, 2, 2), run_far, tiny_model, dataclasses.replace(batch, old_log_probs=old)
    ):
        (metrics,) = result.minibatches
        assert metrics["log_ratio_clamped_count"] == 2
        assert metrics["nonfinite_count"] == 0
        assert metrics["discarded"] == 0
        assert 0 < metrics["grad_norm"] < 100
        ends = torch.cumsum(batch.response_lengths, 0)
        sequence = int((ends <= far).sum())
        token = far - int(ends[sequence] - batch.response_lengths[sequence])
        assert f"response token {token} of sequence {sequence} of the batch" in result.clamped[0]


@on_layouts(first=1)
def test_a_discarded_minibatch_leaves_no_trace(ranks, tiny_model, layout):
    batch = with_log_probs(make_batch())
    found = ranks.run(layout, run_with_and_without, tiny_model, batch)
    for (weights, state, discarded), (expected, moments, _) in found:
        assert "mean importance ratio" in discarded[0]
        assert "not finite" in discarded[1]
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), name
        assert len(state) >= 4 and all(moment.any() for moment in moments)
        assert all(torch.equal(*pair) for pair in zip(state, moments, strict=True))


def run_equal_rewards(layout, platform, model, batch):
    """Change of each parameter by an update without and one with advantages, and metrics."""
    actor = build(layout, platform, model, optimizer={"weight_decay": 0.1})
    update = StepPlan(minibatches=1)
    # Momentum and weight decay would move the weights if there were a step.
    actor.update(batch, update, seed=0)
    equal = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    found = []
    for one in (equal, batch):
        before = {n: p.detach().clone() for n, p in actor.module.named_parameters()}
        (figures,) = actor.update(one, update, seed=1).minibatches
        after = dict(actor.module.named_parameters())
        found.append(
            ({n: float((after[n] - before[n]).abs().max().detach()) for n in before}, figures)
        )
    return found


def test_equal_rewards_change_no_weight(ranks, tiny_model):
    batch = with_log_probs(make_batch())
    for equal, other in ranks.run(Layout(2, 1, 1), run_equal_rewards, tiny_model, batch):
        assert not any(moved for moved in equal[0].values())
        assert equal[1]["grad_norm"] == 0 and equal[1]["discarded"] == 1
        assert all(moved > 0 for moved in other[0].values())


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_layers_keep_what_a_plan_counts(ranks, tiny_model, tensor_parallel):
    """Bytes that four layers keep beyond their inputs, by autograd and by ``rlmath plan layout``.

    Beside what is counted a norm keeps one number per token; attention pads nothing here.
    """
    from rlmath.commands.plan.activations import layer_bytes
    from rlmath.commands.plan.actor_shape import ActorShape
    from rlmath.model.spec import read_model_spec
    from tests.distributed.kept_activations import equal_sequences, kept_bytes

    layout, batch = Layout(tensor_parallel, 1, 1), equal_sequences(6, prompt=8, response=24)
    whole, inputs = (ranks.run(layout, kept_bytes, tiny_model, batch, n)[0] for n in (0, 4))
    shape = read_model_spec(tiny_model)
    # In float32 everything is twice as large but what is float32 in any case.
    of_heads = 4 * shape.heads / tensor_parallel
    layer = 2 * (layer_bytes(shape, ActorShape(layout, 0, 1)) - of_heads) + of_heads
    counted = layer - 4 * shape.hidden / tensor_parallel
    assert (whole - inputs) / 4 / (6 * 32) == pytest.approx(counted, rel=0.02)
