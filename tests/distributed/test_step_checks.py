"""Faults of the drill that lie between advantage and optimizer, on real ranks: each is named in its
step, and healthy steps before, between and after them name nothing.

The default run has one layout with all kinds of ranks but stages; `long` has TP 2, PP 2 and DP 2
alone, each with all weights and with adapters.
"""

import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor import rank_step
from rlmath.actor.plan import StepPlan
from rlmath.actor.sequence_report import SequenceReport
from rlmath.actor.settings import UpdateResult
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.commands.drill import in_update
from rlmath.commands.drill.in_ranks import restore
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.parallel import Layout
from rlmath.training.checks.loss_parts import wrong_loss
from rlmath.training.checks.optimizer_steps import wrong_rates, wrong_steps
from rlmath.training.checks.sequences import (
    Expected,
    wrong_advantages,
    wrong_gradients,
    wrong_places,
    wrong_tokens,
)
from rlmath.training.checks.still_weights import begin, compare_again, find_moved
from rlmath.weights.sequence_fingerprints import token_digests
from tests.support.actors import build, make_batch

KL, ENTROPY = 0.1, 0.01
UPDATE = StepPlan(
    ObjectiveSettings(kl_coef=KL, entropy_coef=ENTROPY), passes=("old", "reference"), minibatches=2
)
OPTIMIZER = {"schedule": Schedule.cosine, "decay_steps": 200}
ADVANTAGES = torch.linspace(-1.0, 2.0, 12)
PLANTS = {
    "negated_on_ranks": in_update.negate_on_ranks,
    "shifted_advantages": in_update.shift_on_ranks,
    "no_gradient": in_update.drop_a_gradient,
    "no_kl": in_update.drop_the_kl,
    "entropy_sign": in_update.turn_the_entropy,
    "moving_reference": in_update.move_the_reference,
    "moving_base": in_update.move_the_base,
    "triple_rate": in_update.triple_the_rate,
    "zeroed_moments": in_update.zero_the_moments,
    "lost_moments": in_update.lose_the_moments,
    "schedule_again": in_update.begin_the_schedule_again,
    "no_sum": in_update.sum_nothing,
    "no_layer_gradient": in_update.drop_a_layers_gradient,
    "no_share_of_layer": in_update.drop_a_layers_micro_batch,
    "no_rank_gradient": in_update.drop_a_ranks_gradient,
}
SAYS = {fault.name: fault.says for fault in in_update.FAULTS}
MORE = [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)]


def plants_of(layout, lora):
    without = {"moving_reference" if lora else "moving_base"}
    if layout.data_parallel == 1:
        without.add("no_sum")
    return [name for name in PLANTS if name not in without]


def run(layout, platform, model, batch, lora):
    """A healthy step, and a step for each fault with a healthy one after it."""
    more = {"lora": Lora(rank=4, alpha=8.0, targets=TARGETS)} if lora else {}
    reference = "frozen"
    actor = build(layout, platform, model, reference=reference, optimizer=dict(OPTIMIZER), **more)
    worker = SimpleNamespace(actor=actor)
    begin(worker)
    found = {}
    names = ["healthy"]
    for name in plants_of(layout, lora):
        names += [name, f"healthy after {name}"]
    for seed, name in enumerate(names):
        taken = UPDATE.minibatches * seed
        if name in PLANTS:
            PLANTS[name](worker)
        shard = pickle.loads(pickle.dumps(actor.shard_of(batch, UPDATE, seed)))
        step = rank_step.RankStep(actor, None, shard)
        step.run_passes(UPDATE)
        step.add_advantages(UPDATE, SequenceAdvantages(ADVANTAGES).select(shard.places))
        result = step.update(UPDATE)
        found[name] = (result, compare_again(worker), taken)
        restore(worker)
        in_update.put_back(worker)
        actor.scheduler.num_steps = taken + UPDATE.minibatches
        actor.scheduler.step(0)
    return found


def sentences(of_ranks, batch):
    """Findings of the driver's checks."""
    results = [one for one, _, _ in of_ranks if one is not None]
    result = UpdateResult.join(results)
    report = result.sequences
    assert isinstance(report, SequenceReport)
    count = len(batch)
    digests = token_digests(batch.tokens, batch.prompt_lengths, batch.sequence_lengths)
    expected = Expected(
        [f"sequence {i}" for i in range(count)],
        [i // 3 for i in range(count)],
        digests,
        batch.loss_token_counts.double(),
        ADVANTAGES.double(),
    )
    settings = OptimizerConfig(lr=1e-3, **OPTIMIZER)
    return [
        *wrong_places(report, expected.names, complete=True),
        *wrong_tokens(report, expected),
        *wrong_advantages(report, expected),
        *wrong_gradients(report, 1e-5, alone=False),
        *(said for one in result.minibatches for said in wrong_loss(one, KL, ENTROPY)),
        *wrong_rates(settings, of_ranks[0][2], result.minibatches),
        *wrong_steps(result.step_findings),
        *find_moved([names for _, names, _ in of_ranks]),
    ]


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        (Layout(2, 1, 2), False),
        *(
            pytest.param(layout, lora, marks=pytest.mark.long)
            for layout in MORE
            for lora in (False, True)
        ),
    ],
    ids=str,
)
def test_each_fault_is_named_in_its_step_and_no_healthy_step_is(layout, lora, ranks, tiny_model):
    batch = make_batch()
    of_ranks = ranks.run(layout, run, tiny_model, batch, lora)
    for name in of_ranks[0]:
        said = sentences([one[name] for one in of_ranks], batch)
        if name in PLANTS:
            assert any(re.search(SAYS[name], one) for one in said), f"{name}: {said}"
        else:
            assert said == [], name
