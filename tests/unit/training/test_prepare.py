"""A step's batch from its groups: passes in order, factors, and advantages once at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlmath.config.load import load
from rlmath.training.gate import Gate
from rlmath.training.passes import Passes
from rlmath.training.prepare import add_policy_factors, build_batch, prepare
from rlmath.types import GradedSample, Group, Problem, Sample, TrainingBatch

GIVEN = ["model.path=tiny", "runner.run_dir=r", "alignment.max_mean_exp_abs_diff=9"]
# Rewards and response lengths of two groups of two.
REWARDS, LENGTHS = (1.0, 0.0, 0.0, 1.0), (2, 1, 3, 1)
ACTOR = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.25, -1.0, -2.0])
REFERENCE = ACTOR - torch.tensor([0.5, 0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
ENTROPY = torch.tensor([0.9, 0.1, 0.2, 0.8, 0.3, 0.7, 0.6])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


class Actor:
    """Returns planted numbers and records the order of the passes."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def log_probs(self, batch: TrainingBatch, reference: bool = False) -> tuple[Tensor, Tensor]:
        assert batch.advantages is None, "advantages come last"
        self.passes.append("reference" if reference else "old")
        return (REFERENCE if reference else ACTOR), ENTROPY

    def values(self, batch: TrainingBatch) -> Tensor:
        self.passes.append("values")
        return VALUES


class Monitor:
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield


def groups() -> list[Group]:
    samples = [
        GradedSample(
            Sample(
                f"p{i // 2}",
                i % 2,
                np.arange(10 * i, 10 * i + n, dtype=np.int32),
                np.full(n, -1.0, np.float32),
                *("", "stop", 4, 0, 0),
            ),
            reward,
            None,
            "ungraded",
        )
        for i, (reward, n) in enumerate(zip(REWARDS, LENGTHS, strict=True))
    ]
    problems = [Problem(f"p{i}", "?", (1, 2), ("2",)) for i in range(2)]
    return [Group(problem, tuple(samples[2 * i : 2 * i + 2])) for i, problem in enumerate(problems)]


def prepared(*overrides: str, step: int = 2, kl_coef: float = 0.0) -> tuple[Any, list[str]]:
    config, actor = load([*GIVEN, *overrides]), Actor()
    rewards = SimpleNamespace(items=[SimpleNamespace(label="math", weight=1.0)])
    sampling = SimpleNamespace(pool=SimpleNamespace(weights_version=4), rewards=rewards)
    session: Any = SimpleNamespace(
        config=config,
        layout=SimpleNamespace(actor=SimpleNamespace(data_parallel=1)),
        actor=actor,
        sampling=sampling,
        gate=Gate(),
    )
    passes = Passes.of(config, step)
    found = prepare(session, groups(), passes, kl_coef, Monitor(), step)  # type: ignore[arg-type]
    return found, actor.passes


def test_one_minibatch_needs_no_pass() -> None:
    found, passes = prepared("algorithm.minibatches_per_step=1", "algorithm.advantage=dr_grpo")
    assert passes == [] and found.entropy is None
    assert found.batch.old_log_probs is None and found.batch.ref_log_probs is None
    assert found.batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, -0.5, 0.5]
    assert found.metrics["rollout/response_tokens"] == 7


def test_several_minibatches_need_the_old_log_probs() -> None:
    found, passes = prepared("algorithm.minibatches_per_step=2")
    assert passes == ["old"]
    assert torch.equal(found.batch.old_log_probs, ACTOR)
    assert found.entropy == pytest.approx(float(ENTROPY.mean()))
    assert {"alignment/k3", "mismatch/k3"} <= set(found.metrics)


def test_rollout_log_probs_can_be_the_old_ones() -> None:
    found, passes = prepared("algorithm.old_log_probs=engine", "algorithm.entropy_top_share=0.5")
    assert passes == ["old"]
    assert found.batch.old_log_probs.tolist() == [-1.0] * 7
    assert int(found.batch.policy_factors.sum()) == 4


def test_a_kl_in_the_reward_costs_this_token_and_those_before_it() -> None:
    found, passes = prepared(
        *("algorithm.minibatches_per_step=2", "algorithm.advantage=dr_grpo"),
        *("algorithm.kl_in=reward", "algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1"),
        kl_coef=0.2,
    )
    assert passes == ["old", "reference"]
    # Cost of the tokens from each one to its response's end.
    cost = torch.tensor([0.5, 0.0, 0.25, 0.75, 0.75, 0.25, 0.0])
    plain = torch.tensor([0.5, 0.5, -0.5, -0.5, -0.5, -0.5, 0.5])
    assert torch.allclose(found.batch.advantages, plain - 0.2 * cost)


def test_gae_reads_values_and_the_kl() -> None:
    found, passes = prepared(
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


def test_top_entropy_tokens_are_a_factor_of_the_policy_term_and_the_mask_stays() -> None:
    """Also when the tokens of a sequence are corrected; nothing else loses a token."""
    config = load(
        [
            *GIVEN,
            "algorithm.entropy_top_share=0.5",
            "algorithm.correction.kind=token_truncate",
            "algorithm.correction.high=1.2",
        ]
    )
    mask = torch.tensor([True, True, False, True, True, True, False])
    batch = build_batch(config, groups())
    batch = dataclasses.replace(batch, old_log_probs=batch.engine_log_probs + 0.1, loss_mask=mask)
    found, metrics = add_policy_factors(config, batch, ENTROPY, None, 1)  # type: ignore[arg-type]
    assert torch.equal(found.loss_mask, mask)
    assert found.policy_factors is not None and metrics["correction/kind"] == 1
    kept = [1.1051709, 0, 0, 1.1051709, 0, 1.1051709, 0]
    assert found.policy_factors.tolist() == pytest.approx(kept)
