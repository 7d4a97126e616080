"""A step's batch from its groups: passes in order, factors, and advantages once at the end."""

import dataclasses
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rlmath.actor.rank_step import RankStep, StepResult
from rlmath.actor.settings import shard_settings
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.peers import Alone
from rlmath.batching.shards import response_rows, shards
from rlmath.config.load import load
from rlmath.model.parallel import Layout
from rlmath.training.controllers import Coefficients
from rlmath.training.metrics import batch_metrics
from rlmath.training.mismatch import mismatch_metrics
from rlmath.training.plan import complete, plan_step
from rlmath.training.step import log_update
from rlmath.training.step_batch import StepBatch
from rlmath.types import Group
from tests.support.samples import make_group, make_sample

GIVEN = ["model.path=tiny", "runner.run_dir=r", "alignment.max_mean_exp_abs_diff=9"]
# Rewards and response lengths of two groups of two.
REWARDS, LENGTHS = (1.0, 0.0, 0.0, 1.0), (2, 1, 3, 1)
ACTOR = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.25, -1.0, -2.0])
REFERENCE = ACTOR - torch.tensor([0.5, 0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
ENTROPY = torch.tensor([0.9, 0.1, 0.2, 0.8, 0.3, 0.7, 0.6])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


class Policy(Alone):
    """Planted numbers for the shard's tokens, and the order of the passes."""

    is_last_stage = reports = True

    def __init__(self):
        self.passes: list[str] = []

    def shard_log_probs(self, shard, name="policy", seed=0):
        assert shard.batch.advantages is None, "advantages come last"
        self.passes.append(name)
        rows = rows_of(shard)
        return TokenValues(rows, (REFERENCE if name == "reference" else ACTOR)[rows], ENTROPY[rows])

    def shard_values(self, shard):
        self.passes.append("values")
        return VALUES[rows_of(shard)]


class Ranks:
    def __init__(self):
        self.policy = Policy()

    def run_part(self, sequences, plan):
        limit = SimpleNamespace(
            max_tokens_per_microbatch=6, max_tokens_per_forward=6, share_prompts=False
        )
        (shard,) = shards(sequences, shard_settings(limit, Layout(), plan))
        # As it travels: read-only arrays and a bit mask.
        self.step = RankStep(self.policy, self.policy, pickle.loads(pickle.dumps(shard)))
        return self.step.run_passes(plan)

    def add_advantages(self, plan, advantages):
        places = self.step.shard.places
        own = None if advantages is None else advantages.select(places)
        found = self.step.add_advantages(plan, own)
        return found

    @property
    def batch(self):
        """The rank's batch, in the order of the step's sequences."""
        return self.step.shard.batch.select(self.step.shard.places.argsort().tolist())


def rows_of(shard):
    return response_rows(shard.places, torch.tensor(LENGTHS))


def groups():
    samples = [
        make_sample(f"p{i // 2}", i % 2, range(10 * i, 10 * i + n), log_probs=-1.0, version=4)
        for i, n in enumerate(LENGTHS)
    ]
    return [make_group(samples[i : i + 2], REWARDS[i : i + 2]) for i in (0, 2)]


def prepare(*overrides, kl_coef=0.0, given=None, teacher=None):
    """A fifth step up to its update."""
    config, ranks = load([*GIVEN, *overrides]), Ranks()
    rewards = SimpleNamespace(items=[SimpleNamespace(label="math", weight=1.0)])
    monitor = mock.MagicMock()
    plan = plan_step(config, 5, kl_coef)
    batch = StepBatch.of(config.algorithm, given or groups(), rewards, 4, teacher)
    alignment = ranks.run_part(batch.sequences, plan)
    plan = complete(plan, alignment, Coefficients(config.algorithm), monitor, 5)
    figures = ranks.add_advantages(plan, None if plan.values else batch.advantages(config))
    metrics = batch_metrics(batch.sequences) | mismatch_metrics(alignment)
    report = StepResult(figures, None, None)
    metrics |= log_update(config, batch, plan, report, monitor, 5)
    found = SimpleNamespace(
        batch=ranks.batch,
        metrics=metrics,
        fingerprints=figures.fingerprints,
        entropy=None if alignment is None else alignment.entropy,
    )
    return found, ranks.policy.passes


def test_a_kl_in_the_reward_costs_this_token_and_those_before_it():
    found, passes = prepare(
        *("algorithm.minibatches_per_step=2", "algorithm.advantage=dr_grpo"),
        *("algorithm.kl_in=reward", "algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1"),
        kl_coef=0.2,
    )
    assert passes == ["old", "reference"]
    # Cost of the tokens from each one to its response's end.
    cost = torch.tensor([0.5, 0.0, 0.25, 0.75, 0.75, 0.25, 0.0])
    plain = torch.tensor([0.5, 0.5, -0.5, -0.5, -0.5, -0.5, 0.5])
    assert torch.allclose(found.batch.advantages, plain - 0.2 * cost)


def test_gae_reads_values_and_the_kl():
    found, passes = prepare(
        *("algorithm.advantage=gae", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"),
        *("algorithm.kl_coef=0.1", "value.whiten_advantages=false"),
        kl_coef=0.2,
    )
    assert passes == ["old", "reference", "values"]
    # With gamma and lambda 1 the return is the reward to come, less the KL's cost.
    reward = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    cost = torch.tensor([0.5, 0.0, 0.25, 0.75, 0.75, 0.25, 0.0])
    assert torch.allclose(found.batch.returns, reward - 0.2 * cost)
    assert torch.allclose(found.batch.advantages, found.batch.returns - VALUES)


def test_a_teachers_term_is_added_last_and_within_its_bound():
    """After the whitening, to which it does not belong; of the actor's log-probs, not the engine's;
    each token for itself."""
    of_tokens = ACTOR + torch.tensor([0.5, -9.0, 0.25, -torch.inf, 0.0, 9.0, -1.0])
    teacher = [one.numpy() for one in of_tokens.split(list(LENGTHS))]
    settings = ("algorithm.minibatches_per_step=1", "algorithm.whiten_tokens=true")
    plain, _ = prepare(*settings)
    distilled = (*settings, "algorithm.distill_coef=0.5", "algorithm.distill_clip=2")
    found, passes = prepare(*distilled, "teacher.path=t", teacher=teacher)
    assert passes == ["old"], "its log-probs are the policy's in the difference"
    term = 0.5 * torch.tensor([0.5, -2.0, 0.25, -2.0, 0.0, 2.0, -1.0])
    assert torch.allclose(found.batch.advantages, plain.batch.advantages + term)
    assert found.metrics["distill/reverse_kl"] == pytest.approx(2.25 / 7)
    assert found.metrics["distill/clipped_share"] == pytest.approx(3 / 7)
    assert {"teacher_log_probs", "advantages"} <= set(found.fingerprints.bits)


def test_a_teacher_alone_needs_no_reward():
    """A sample that nothing could score takes part, and one that is masked does not."""
    unscored = [
        Group(g.problem, tuple(dataclasses.replace(s, reward=None) for s in g.samples))
        for g in groups()
    ]
    teacher = [one.numpy() for one in (ACTOR - 1.0).split(list(LENGTHS))]
    settings = ("algorithm.advantage=teacher", "algorithm.distill_coef=1", "teacher.path=t")
    found, _ = prepare(*settings, given=unscored, teacher=teacher)
    assert found.batch.loss_mask.all()
    assert found.batch.advantages.tolist() == pytest.approx([-1.0] * 7)
    again, _ = prepare("algorithm.advantage=grpo", given=unscored)
    assert not again.batch.loss_mask.any()


def test_top_entropy_tokens_are_a_factor_of_the_policy_term_and_the_mask_stays():
    """Also when the tokens of a sequence are corrected; nothing else loses a token."""
    found, _ = prepare(
        "algorithm.entropy_top_share=0.5",
        "algorithm.correction.kind=token_truncate",
        "algorithm.correction.high=1.2",
    )
    assert found.batch.loss_mask.all() and found.metrics["correction/kind"] == 1
    # Weights of 1, e^-1, 1.2, e^-0.5, 1.2, 1, e^-1; of the seven tokens four are kept.
    kept = [1.0, 0, 0, 0.6065307, 0, 1.0, 0.3678795]
    assert found.batch.policy_factors.tolist() == pytest.approx(kept)
