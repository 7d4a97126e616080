"""A step whose shards stay on the ranks gives the same numbers on every layout."""

import dataclasses
import pickle

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import RankStep
from rlmath.actor.sequence_report import GRADIENT, SequenceReport
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.distillation import distill
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import response_rows
from rlmath.model.parallel import Layout
from rlmath.weights.sequence_fingerprints import token_digests
from tests.support.actors import build, make_batch, on_layouts

TRACED = (2, 7, 11)
DISTILL = {"coef": 0.5, "clip": 0.75}
# All that needs other ranks' sequences: whitening and the share of the highest entropies; and what
# a teacher adds to each token.
PLAN = StepPlan(
    objective=ObjectiveSettings(kl_coef=0.1, kl_estimator="k1"),
    passes=("old", "reference"),
    minibatches=2,
    correction=CorrectionConfig("token_truncate", high=1.05),
    entropy_top_share=0.4,
    kl_in_reward=0.2,
    distill_coef=DISTILL["coef"],
    distill_clip=DISTILL["clip"],
    traced=TRACED,
)
ADVANTAGES = SequenceAdvantages(torch.linspace(-1.0, 2.0, 12).double(), whiten_epsilon=1e-6)


def run(layout, platform, model, batch):
    """Two steps; in the second the reference is another model. What the reporting ranks have."""
    # Beside one rank, whose passes take the update's micro-batches.
    forward = None if layout.world_size == 1 else 160
    reference = "frozen"
    actor = build(layout, platform, model, reference=reference, max_tokens_per_forward=forward)
    for seed in range(2):
        shard = pickle.loads(pickle.dumps(actor.shard_of(batch, PLAN, seed)))
        step = RankStep(actor, None, shard)
        alignment = step.run_passes(PLAN)
        figures = step.add_advantages(PLAN, ADVANTAGES.select(shard.places))
        mine = step.shard.batch
        result = step.update(PLAN)
        # The optimizer's steps are Adam's, of gradients that are summed over all ranks.
        if result is not None:
            assert result.alignment is None
            assert len(result.step_findings) == len(result.minibatches)
            assert not any(one.kind for _, one in result.step_findings), result.step_findings
    reported = [x is not None for x in (alignment, figures, result)]
    assert reported == [actor.reports] * 3
    if not actor.reports:
        return None
    rows = response_rows(shard.places, batch.response_lengths)
    values = (mine.advantages, mine.policy_factors)
    return rows, *values, alignment, figures, result, mine.old_log_probs


@pytest.fixture(scope="module")
def batch():
    made = make_batch()
    tokens = int(made.response_lengths.sum())
    teacher = torch.linspace(-9.0, -0.1, tokens)[
        torch.randperm(tokens, generator=torch.manual_seed(0))
    ]
    # Tokens that the loss leaves out were not sampled.
    return dataclasses.replace(
        made, advantages=None, teacher_log_probs=teacher, model_mask=made.loss_mask
    )


@pytest.fixture(scope="module")
def alone(ranks, tiny_model, batch):
    return join(ranks.run(Layout(1, 1, 1), run, tiny_model, batch))


def join(results):
    shares = [one for one in results if one is not None]
    order = torch.cat([rows for rows, *_ in shares]).argsort()
    sequences = SequenceReport.join([one[5].sequences for one in shares])
    in_step = sequences.places.argsort()
    alignment = Alignment.join([one[3] for one in shares])
    totals = shares[0][4].correction
    distilled = shares[0][4].distill
    for one in shares[1:]:
        totals = totals + one[4].correction
        distilled = distilled + one[4].distill
    return {
        "advantages": torch.cat([one[1] for one in shares])[order],
        "factors": torch.cat([one[2] for one in shares])[order],
        "alignment": alignment.loss.metrics() | {"entropy": alignment.entropy},
        "farthest": alignment.farthest[alignment.places.argsort()],
        "correction": totals.metrics(),
        "distill": distilled.metrics(),
        "old": torch.cat([one[6] for one in shares])[order],
        "minibatches": shares[0][5].minibatches,
        "places": sequences.places[in_step],
        "tokens": sequences.tokens[in_step],
        "sequence_sums": sequences.sums[in_step],
        "traces": sorted((t for one in shares for t in one[5].traces), key=lambda t: t.place),
    }


@on_layouts(first=1)
def test_rank_step_is_equal_on_layouts(layout, ranks, tiny_model, batch, alone):
    found = join(ranks.run(layout, run, tiny_model, batch))
    close = {"rtol": 1e-4, "atol": 1e-5}
    for name in ("advantages", "factors"):
        torch.testing.assert_close(found[name], alone[name], **close)
    torch.testing.assert_close(found["farthest"][:, 0], alone["farthest"][:, 0], **close)
    for name in ("alignment", "correction", "distill"):
        assert found[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)
    for one, wanted in zip(found["minibatches"], alone["minibatches"], strict=True):
        assert one == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    # Each sequence once, with its tokens, and what it brought and got.
    assert found["places"].tolist() == list(range(len(batch)))
    lengths = batch.sequence_lengths
    assert torch.equal(found["tokens"], token_digests(batch.tokens, batch.prompt_lengths, lengths))
    size = float(alone["sequence_sums"][:, GRADIENT].abs().max())
    torch.testing.assert_close(
        found["sequence_sums"], alone["sequence_sums"], rtol=1e-4, atol=1e-4 * size
    )
    assert [one.place for one in found["traces"]] == list(TRACED)
    wanted_of = {one.place: one for one in alone["traces"]}
    for one in found["traces"]:
        wanted = wanted_of[one.place]
        assert one.values.keys() == wanted.values.keys()
        for name, values in wanted.values.items():
            torch.testing.assert_close(one.values[name], values, **close)


def test_rank_step_statistics_cover_the_whole_step(alone, batch):
    # A teacher's term comes last.
    term = distill(
        alone["old"], batch.teacher_log_probs, batch.loss_mask, batch.response_lengths, **DISTILL
    )
    assert term.totals.metrics() == pytest.approx(alone["distill"], rel=1e-5)
    assert 0 < alone["distill"]["clipped_share"] < 1
    mask = batch.loss_mask
    advantages = (alone["advantages"] - term.advantages)[mask].double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std()) == pytest.approx(1.0, abs=1e-5)
    kept = int((alone["factors"] > 0).sum())
    assert kept == -(-4 * int(mask.sum()) // 10)
    assert not alone["factors"][~mask].any()
    # A trace has its own sequence's tokens.
    ends = torch.cumsum(batch.response_lengths, 0).tolist()
    for one in alone["traces"]:
        rows = slice(ends[one.place] - int(batch.response_lengths[one.place]), ends[one.place])
        assert torch.equal(one.values["engine_log_probs"], batch.engine_log_probs[rows])
        assert torch.equal(one.values["loss_mask"], mask[rows])
        assert torch.equal(one.values["advantages"], alone["advantages"][rows])
