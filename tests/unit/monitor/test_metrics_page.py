"""``docs/metrics.md`` explains every tag that the loops make, and none that they do not."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.routing_totals import RoutingTotals
from rlmath.actor.settings import UpdateResult
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import CorrectionConfig, CorrectionTotals, LagTotals
from rlmath.algorithms.distillation import distill
from rlmath.algorithms.dynamic_sampling import PoolCounts
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.losses import LOSSES, LossInputs, metric_means
from rlmath.algorithms.losses.clip import DualClipOptions
from rlmath.algorithms.mismatch import measure
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.off_policy import OffPolicyTotals
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.from_groups import sampled_sequences
from rlmath.config.load import load
from rlmath.config.rollout import RolloutConfig, RolloutSchedule
from rlmath.config.schema import AlgorithmConfig
from rlmath.data import ProblemStream
from rlmath.evaluation.metrics import benchmark_metrics, tag_metrics
from rlmath.rewards.stats import RewardStats
from rlmath.rollout.lag import LengthTotals, lag_metrics
from rlmath.rollout.sampler import Sampler
from rlmath.training.controllers import Coefficients
from rlmath.training.group_source import GroupSource
from rlmath.training.metrics import off_policy_metrics, rollout_metrics, update_metrics
from rlmath.training.mismatch import correction_metrics, mismatch_metrics
from rlmath.types import Group, Problem

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
TAG = re.compile(r"`([a-z_]+/[a-z0-9_/<>]+)`")
# A row's first cell holds its tags.
DOCUMENTED = {
    tag
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| tag")
    for tag in TAG.findall(line.split(" | ")[0])
}


def update_tags():
    """Every figure of every loss with everything on."""
    one = torch.zeros(1)
    inputs = LossInputs(
        log_probs=one,
        old_log_probs=one,
        engine_log_probs=one,
        advantages=one,
        mask=torch.ones(1, dtype=torch.bool),
        weights=one,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        ref_log_probs=one,
        entropy=one,
    )
    tags = set()
    for loss in LOSSES.names():
        settings = [ObjectiveSettings(loss=loss, off_policy_mask_kl=1.0)]
        if loss == "ppo_clip":
            settings.append(ObjectiveSettings(loss=loss, options=DualClipOptions(dual_clip=3.0)))
        for setting in settings:
            output = policy_objective(inputs, setting)
            figures = metric_means({k: float(v) for k, v in output.metric_sums.items()})
            figures |= {name: float(value) for name, value in output.metric_maxima.items()}
            others = dict.fromkeys(("grad_norm", "lr", "discarded"), 0.0)
            tags |= set(update_metrics(UpdateResult([figures | others], {}, None)))
    return tags | set(Coefficients(AlgorithmConfig()).metrics(entropy_coef=0.0))


def reward_tags():
    stats = RewardStats()
    stats.add_values("math", [1.0, None], seconds=1.0)
    stats.add_statuses("math", ["correct"])
    stats.add_error("math")
    tags = stats.drain()
    return {tag.replace("/math/", "/<name>/").replace("/correct", "/<status>") for tag in tags}


def eval_tags(group):
    samples = [dataclasses.replace(s, status="ungraded", reward=1.0) for s in group.samples]
    ungraded = dataclasses.replace(group, samples=tuple(samples))
    figures = benchmark_metrics([group, group]) | benchmark_metrics([ungraded, ungraded])
    tags = tag_metrics({"held_out": figures, "aime24": figures}).keys()
    tags = {re.sub(r"eval/(held_out|aime24)/", "eval/<benchmark>/", tag) for tag in tags}
    return {re.sub(r"_at_\d+", "_at_<k>", tag) for tag in tags}


def mismatch_tags(group):
    """With samples of two versions of the weights, and a correction."""
    samples = tuple(
        dataclasses.replace(
            one, reward=1.0, sample=dataclasses.replace(one.sample, spans=((4 + index, 0),))
        )
        for index, one in enumerate(group.samples)
    )
    batch = sampled_sequences(
        [Group(group.problem, samples)], truncated=TruncatedRule.keep, mask_duplicates=False
    ).select(range(2))
    log_probs = batch.engine_log_probs
    found = Alignment.of_batch(batch, log_probs, log_probs, 5)
    totals = CorrectionTotals(3, 2, 0, 0, 0, 3.0, {0: LagTotals(2), 1: LagTotals(1)})
    figures = correction_metrics(CorrectionConfig("token_mask"), totals)
    tags = set(mismatch_metrics(found))
    left_out = {5: OffPolicyTotals(2), 4: OffPolicyTotals(1, 1)}
    figures |= off_policy_metrics(UpdateResult([], {}, None, off_policy=left_out), now=5)
    return {re.sub(r"lag_\d+", "lag_<n>", tag) for tag in tags | set(figures)}


def sampling_tags(group):
    """Tags of ``carry_over``, whose sampler has them all."""
    config = load(
        [
            *("model.path=m", "runner.run_dir=r", "algorithm.curriculum.cooldown=true"),
            *("rollout.schedule=carry_over", "rollout.cut_after_tokens=8"),
        ]
    )
    sampler = Sampler(config, ProblemStream([Problem("p", "?", (1,), ("2",))]))
    work = SimpleNamespace(continued=1, recomputed_tokens=2)
    totals = LengthTotals()
    totals.add([group], [group])
    made = sampler._work_metrics(work) | lag_metrics([group], 5) | totals.bias([])
    return made.keys() | sampler._metrics(PoolCounts(1, 1, 1, {}, 0, 0.5), 1, 1)


def waiting_tags():
    unused = None
    rollout = RolloutConfig(schedule=RolloutSchedule.pipelined)
    run = SimpleNamespace(config=SimpleNamespace(rollout=rollout))
    return set(GroupSource(run, unused, unused).metrics())


def routing_tags():
    totals = RoutingTotals.zeros(2, 4, torch.device("cpu"))
    one, is_text = torch.tensor([[0, 1]]), torch.tensor([True])
    totals.add_compared(1, one, one, is_text)
    totals.add_engine(1, one, one, is_text, is_text)
    totals.add_mismatch(torch.zeros(1), torch.ones(1), torch.ones(1), is_text)
    made = totals.metrics([False, True])
    return {re.sub(r"layer_\d+", "layer_<n>", tag) for tag in made}


def distill_tags():
    one = torch.zeros(4)
    mask, lengths = torch.ones(4, dtype=torch.bool), torch.tensor([4])
    found = distill(one, one, mask, lengths, coef=1.0, clip=1.0).totals.metrics()
    return {re.sub(r"part_\d", "part_<n>", f"distill/{tag}") for tag in found}


def test_metrics_of_the_loops_are_documented(group):
    alignment = {f"alignment/{name}" for name in measure(torch.zeros(1), torch.zeros(1)).metrics()}
    graded = group.samples[0]
    calls = dataclasses.replace(graded.sample, calls=(("python", "ok", 0.1),))
    called = dataclasses.replace(
        group, samples=(dataclasses.replace(graded, sample=calls), *group.samples[1:])
    )
    made = rollout_metrics([called]).keys() | eval_tags(called)
    made = made | update_tags() | reward_tags() | alignment | mismatch_tags(group)
    made |= sampling_tags(group) | routing_tags() | waiting_tags() | distill_tags()
    assert made <= DOCUMENTED, sorted(made - DOCUMENTED)
    prefixes = (
        "eval/<benchmark>/",
        "grading/",
        "rewards/",
        "train/",
        "mismatch/",
        "correction/",
        "sampling/",
        "curriculum/",
        "routing/",
        "tools/",
    )
    explained = {tag for tag in DOCUMENTED if tag.startswith(prefixes)}
    assert explained <= made, sorted(explained - made)


@pytest.mark.parametrize(
    "source",
    [
        "training/loop.py",
        "training/step.py",
        "training/mismatch.py",
        "evaluation/run.py",
        "training/sft.py",
        "training/metrics.py",
    ],
)
def test_every_tag_written_in_a_loop_is_explained(source):
    code = (Path(__file__).parents[3] / "rlmath" / source).read_text(encoding="utf-8")
    phases = {f"timing/{name}" for name in re.findall(r'monitor\.phase\("(\w+)"\)', code)}
    groups = {tag.split("/")[0] for tag in DOCUMENTED}
    written = {
        tag
        for tag in re.findall(r'"([a-z_]+/[a-z_]+)"', code)
        if tag.split("/")[0] in groups and tag != "train/entropy"  # Renamed to entropy_loss.
    }
    assert phases | written <= DOCUMENTED, sorted((phases | written) - DOCUMENTED)
