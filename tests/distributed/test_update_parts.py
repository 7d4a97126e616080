"""A minibatch whose gradient is added up part by part (``algorithm.overlap_update``): the same
update as that of all at once, to what another order of additions rounds otherwise."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmath.actor.observer import UpdateObserver
from rlmath.actor.policy import MegatronActor
from rlmath.actor.rank_step import RankStep, TokenSettings
from rlmath.actor.sample_probe import SampleProbe
from rlmath.actor.settings import ReferenceSettings, UpdateResult, UpdateSettings, shard_settings
from rlmath.actor.step_parts import PartFigures, PartSettings, StepParts
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.aggregation import AGGREGATIONS, denominator
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import CorrectionConfig, CorrectionKind
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import shards
from rlmath.device import Platform
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.parallel import Layout
from rlmath.types import TrainingBatch
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_actor import (
    LAYOUTS,
    adam_state,
    build,
    in_float64,
    make_batch,
    tied_model,  # noqa: F401
)
from tests.distributed.test_mixture import make_mixture

OBJECTIVE = ObjectiveSettings(kl_coef=0.1, entropy_coef=0.01, off_policy_mask_kl=0.05)
UPDATE = UpdateSettings(objective=OBJECTIVE, early_stop_ratio=5.0, constant_length=30)
TOKENS = TokenSettings(
    correction=CorrectionConfig(CorrectionKind.token_truncate, high=1.05), kl_coef=0.2
)
ADVANTAGES = SequenceAdvantages(torch.linspace(-1.0, 2.0, 12).double())
# Whole groups. One has fewer sequences than there are ranks, and none is in the step's order.
PARTS = ((8,), (0, 1, 2, 9, 10, 11), (3, 4, 5, 6, 7))
LOOKED_AT = (1, 8)
# Adam divides by the gradient's size: what is rounded off of a gradient of nearly 0 would be as
# large as any.
SMOOTH = {"adam_eps": 1e-3}


@pytest.fixture(scope="module")
def batch() -> TrainingBatch:
    made = make_batch()
    mask = made.loss_mask.clone()
    # A sequence that takes no part.
    first = int(made.response_lengths[:4].sum())
    mask[first : first + int(made.response_lengths[4])] = False
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3])
    return dataclasses.replace(made, advantages=None, loss_mask=mask, group_ids=groups)


def whole_step(actor: MegatronActor, batch: TrainingBatch, update: UpdateSettings) -> Any:
    step = RankStep(actor, None, actor.shard_of(batch, update))
    alignment = step.log_probs(0)
    step.reference_log_probs()
    figures = step.finish(TOKENS, ADVANTAGES.select(step.shard.places))
    result, _ = step.update(update, 0, LOOKED_AT)
    return alignment, figures, result


def add_parts(
    actor: MegatronActor,
    layout: Layout,
    batch: TrainingBatch,
    update: UpdateSettings,
    advantages: SequenceAdvantages = ADVANTAGES,
    old_log_probs: bool = True,
) -> tuple[StepParts, list[PartFigures]]:
    dealing = shard_settings(actor.settings, layout, update)
    dealing = dataclasses.replace(dealing, idle_ranks=True, is_part=True)
    parts, found = StepParts(actor), []
    settings = PartSettings(update, TOKENS, old_log_probs, True, 0)
    for places in PARTS:
        dealt = list(shards(batch.select(places), dealing))
        shard = pickle.loads(pickle.dumps(dealt[actor.dp_rank]))
        of_step = torch.tensor(places)
        one = parts.add(shard, settings, advantages.select(of_step[shard.places]))
        if one is not None:
            found.append(one.at(of_step))
    return parts, found


def finish(parts: StepParts, batch: TrainingBatch, update: UpdateSettings) -> Any:
    divisor = denominator(update.aggregation, batch.loss_token_counts, batch.group_ids)
    return parts.update([torch.tensor(one) for one in PARTS], update, divisor, LOOKED_AT)


def run(
    layout: Layout,
    platform: Platform,
    model: str,
    batch: TrainingBatch,
    aggregations: Sequence[str],
    changes: dict[str, Any],
    trouble: bool = False,
) -> list[Any]:
    """Of updates all at once and in parts, and in parts with ``trouble``: what there is to compare.

    Args:
        trouble: Between the steps there are others, that are begun and not finished, and that
            are discarded; and log-prob passes between the parts.
    """
    runs: list[Any] = []
    for kind in ("whole", "parts", "trouble")[: 2 + trouble]:
        actor = build(layout, platform, model, reference=ReferenceSettings("frozen"), **changes)
        found: list[Any] = []
        # One all at once must be possible before and after it.
        whole_step(actor, batch, UPDATE)
        for number, aggregation in enumerate(aggregations):
            update = dataclasses.replace(UPDATE, aggregation=aggregation)
            if number == len(aggregations) - 1:
                actor.probe = SampleProbe(dict.fromkeys(LOOKED_AT, 0))
                actor.observer = UpdateObserver()
            if kind == "whole":
                alignment, figures, result = whole_step(actor, batch, update)
                of_parts = [PartFigures(alignment, figures)] if actor.reports else []
            else:
                if kind == "trouble":
                    make_trouble(actor, layout, batch, update)
                parts, of_parts = add_parts(actor, layout, batch, update)
                if kind == "trouble":
                    actor.log_probs(batch, noise_seed=3)
                result = finish(parts, batch, update)
            found.append((of_parts, result))
        assert actor.probe is not None and actor.observer is not None
        probed, watched = actor.probe.found, actor.observer.finish(actor.optimizer, actor.reports)
        actor.probe = actor.observer = None
        whole_step(actor, batch, UPDATE)
        weights = {n: p.detach().clone() for n, p in actor.module.named_parameters()}
        runs.append((found, weights, adam_state(actor.optimizer), probed, watched))
    return runs


def make_trouble(
    actor: MegatronActor, layout: Layout, batch: TrainingBatch, update: UpdateSettings
) -> None:
    before = adam_state(actor.optimizer)
    probe, actor.probe = actor.probe, None
    observer, actor.observer = actor.observer, None
    broken = SequenceAdvantages(ADVANTAGES.values * torch.nan)
    result = finish(add_parts(actor, layout, batch, update, broken)[0], batch, update)
    if actor.reports:
        assert "not finite" in result.early_stopped[0] and result.minibatches[0]["discarded"] == 1
    add_parts(actor, layout, batch, update)
    actor.probe, actor.observer = probe, observer
    assert all(torch.equal(*pair) for pair in zip(adam_state(actor.optimizer), before, strict=True))


CASES = [
    # A fault of one rank shows on several too.
    pytest.param(LAYOUTS[0], sorted(AGGREGATIONS.names()), {}, marks=pytest.mark.long),
    (LAYOUTS[1], ["prompt_mean"], {}),
    (LAYOUTS[2], ["seq_mean_token_mean"], {}),
]


@pytest.mark.parametrize(("layout", "aggregations", "changes"), CASES, ids=str)
def test_the_update_is_that_of_the_whole_minibatch(
    layout: Layout,
    aggregations: list[str],
    changes: dict[str, Any],
    ranks: RankPool,
    tied_model: str,  # noqa: F811
    batch: TrainingBatch,
) -> None:
    has_trouble = layout.data_parallel > 1
    given = (tied_model, batch, aggregations, {"optimizer": SMOOTH, **changes}, has_trouble)
    of_ranks = ranks.run(layout, run, *given)
    for whole, parts, *after_trouble in of_ranks:
        assert_close(parts, whole)
        for trouble in after_trouble:
            # To the last bit.
            for name, one in parts[1].items():
                assert torch.equal(one, trouble[1][name]), name
            assert all(torch.equal(*pair) for pair in zip(parts[2], trouble[2], strict=True))
    for number in range(len(aggregations)):
        kinds = range(2 + has_trouble)
        check_figures([joined([one[kind] for one in of_ranks], number) for kind in kinds])


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(1, 1, 1), {"lora": Lora(rank=4, alpha=6.0, targets=TARGETS)}),
        (Layout(1, 1, 2, expert_parallel=2), {}),
        (Layout(1, 2, 2, expert_parallel=2), {}),
    ],
    ids=str,
)
def test_adapters_and_experts(
    layout: Layout,
    changes: dict[str, Any],
    ranks: RankPool,
    batch: TrainingBatch,
    tmp_path: Path,
) -> None:
    """Which lie in the same buffers, or in other ones."""
    model = make_mixture(tmp_path)
    given = (model, batch, ["token_mean"], {"optimizer": SMOOTH, **changes}, True)
    for whole, parts, trouble in ranks.run(layout, run, *given):
        assert_close(parts, whole)
        assert all(torch.equal(*pair) for pair in zip(parts[2], trouble[2], strict=True))


def assert_close(found: Any, wanted: Any) -> None:
    """Weights, Adam's state, and what was looked at."""
    for name, one in found[1].items():
        torch.testing.assert_close(one, wanted[1][name], rtol=0, atol=1e-6, msg=name)
    for one, right in zip(found[2], wanted[2], strict=True):
        size = float(right.abs().max())
        torch.testing.assert_close(one, right, rtol=0, atol=3e-5 * size)
    assert set(found[3]) == set(LOOKED_AT)
    for place, one in found[3].items():
        right = wanted[3][place]
        for name in ("own", "earlier", "both"):
            size = max(right.own, right.earlier)
            assert getattr(one, name) == pytest.approx(getattr(right, name), abs=1e-4 * size)


def joined(of_ranks: Sequence[Any], number: int) -> dict[str, Any]:
    """What the driver makes of a step."""
    figures = [one for found, *_ in of_ranks for one in found[number][0]]
    results = [found[number][1] for found, *_ in of_ranks if found[number][1] is not None]
    result = UpdateResult.joined(results)
    alignment = Alignment.joined([one.alignment for one in figures])
    assert sorted(alignment.places.tolist()) == list(range(12))
    prints = {
        place: (name, float(total))
        for one in figures
        for name, totals in one.tokens.fingerprints.sums.items()
        for place, total in zip(one.tokens.fingerprints.places.tolist(), totals, strict=True)
    }
    watched = [pulls for *_, one in of_ranks for pulls in one.pulls]
    return {
        "minibatch": result.minibatches[0],
        "alignment": alignment.loss.metrics() | {"entropy": alignment.entropy},
        "farthest": alignment.farthest[alignment.places.argsort()],
        "prints": prints,
        "off_policy": result.off_policy,
        "traces": sorted(result.traces, key=lambda one: one.place),
        "correction": _added([one.tokens.correction for one in figures]).metrics(),
        "pulls": {
            place: float(values.sum())
            for one in watched
            for place, values in zip(
                one.places.tolist(), one.values.split(one.response_lengths.tolist()), strict=True
            )
        },
    }


def _added(several: list[Any]) -> Any:
    total = several[0]
    for one in several[1:]:
        total = total + one
    return total


def check_figures(kinds: Sequence[dict[str, Any]]) -> None:
    wanted, *others = kinds
    for found in others:
        for name in ("minibatch", "alignment", "correction", "pulls"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
        assert set(found["pulls"]) == set(range(12))
        assert found["off_policy"] == wanted["off_policy"]
        assert found["prints"].keys() == wanted["prints"].keys()
        for place, (name, total) in found["prints"].items():
            assert (name, total) == (
                wanted["prints"][place][0],
                pytest.approx(wanted["prints"][place][1], rel=1e-4, abs=1e-4),
            )
        torch.testing.assert_close(found["farthest"], wanted["farthest"], rtol=0, atol=1e-5)
        assert [one.place for one in found["traces"]] == list(LOOKED_AT)
        for one, right in zip(found["traces"], wanted["traces"], strict=True):
            assert one.weight == pytest.approx(right.weight, rel=1e-6)
            assert one.values.keys() == right.values.keys()
            for name, values in right.values.items():
                torch.testing.assert_close(one.values[name], values, rtol=1e-4, atol=1e-5)


def run_norm(
    layout: Layout, platform: Platform, model: str, batch: TrainingBatch
) -> tuple[list[PartFigures], UpdateResult]:
    actor = build(layout, platform, model, reference=ReferenceSettings("frozen"))
    tokens = TokenSettings()
    update = UpdateSettings(objective=ObjectiveSettings(entropy_coef=0.01))
    dealing = dataclasses.replace(
        shard_settings(actor.settings, layout, update), idle_ranks=True, is_part=True
    )
    parts, found = StepParts(actor), []
    for places in PARTS:
        shard = list(shards(batch.select(places), dealing))[actor.dp_rank]
        own = ADVANTAGES.select(torch.tensor(places)[shard.places])
        one = parts.add(shard, PartSettings(update, tokens, False, False, 0), own)
        found += [] if one is None else [one.at(torch.tensor(places))]
    return found, finish(parts, batch, update)


def test_the_gradient_is_that_of_float64(
    ranks: RankPool,
    tied_model: str,  # noqa: F811
    batch: TrainingBatch,
) -> None:
    """Without a pass before the update: the log-probs are those of its forward passes."""
    of_ranks = ranks.run(Layout(1, 1, 2), run_norm, tied_model, batch)
    (metrics,) = of_ranks[0][1].minibatches
    alignment = Alignment.joined([one.alignment for figures, _ in of_ranks for one in figures])
    hf, log_p, entropy = in_float64(tied_model, batch)
    advantages = torch.repeat_interleave(ADVANTAGES.values, batch.response_lengths)
    # The ratio is 1, and its derivative that of the log-prob.
    losses = -(log_p - log_p.detach()).exp() * advantages - 0.01 * entropy
    mask = batch.loss_mask
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in hf.parameters() if p.grad is not None))
    assert metrics["importance_ratio"] == 1
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["loss_weight"] == pytest.approx(1, rel=1e-6)
    difference = (log_p.detach() - batch.engine_log_probs)[mask]
    found = alignment.loss.metrics()["mean_exp_abs_diff"]
    assert found == pytest.approx(float(difference.abs().exp().mean()), rel=1e-5)
    assert alignment.entropy == pytest.approx(float(entropy.detach()[mask].mean()), rel=1e-5)
