"""Methods that docs/algorithms.md says are combinations of settings: they compose, and are those.

The settings come from the page's table. Each objective is then computed through them, and by its
paper's formula in plain numbers.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmath.algorithms.aggregation import sequence_weights
from rlmath.algorithms.correction import correct
from rlmath.algorithms.losses import LossInputs
from rlmath.algorithms.objective import policy_objective
from rlmath.checks.algorithm import algorithm_problems
from rlmath.config.load import load
from rlmath.config.schema import Config, OldLogProbs
from rlmath.training.algorithm_settings import (
    aggregation_constant,
)
from rlmath.training.plan import plan_step

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"
METHODS = ("LUSPO", "ScaleRL", "decoupled PPO", "TIS-REINFORCE", "DPPO of prime-rl")
LENGTHS, GROUPS = [3, 1, 4, 2], [0, 0, 1, 1]
ADVANTAGES = [1.0, -0.5, -1.5, 0.75]


def documented() -> dict[str, list[str]]:
    """Method to settings, from the rows of the page's table."""
    rows = re.findall(r"^\| \*\*(.+?)\*\*.*?\|.*?\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.M)
    return {name: settings.split() for name, settings in rows}


def compose(method: str) -> Config:
    return load([*documented()[method], "model=tiny", "runner.run_dir=r"])


def test_the_page_has_them_all() -> None:
    assert tuple(documented()) == METHODS


@pytest.mark.parametrize("method", METHODS)
def test_it_passes_the_checks_and_reads_every_setting(method: str) -> None:
    config = compose(method)
    assert list(algorithm_problems(config)) == []
    assert config.algorithm.early_stop_ratio is None


def per_sequence(values: list[float]) -> list[list[float]]:
    out, start = [], 0
    for n in LENGTHS:
        out.append(values[start : start + n])
        start += n
    return out


def objective(config: Config) -> tuple[float, dict[str, list[list[float]]]]:
    """The loss of four sequences, by the settings, and their log-probs."""
    g = torch.Generator().manual_seed(4)
    r = sum(LENGTHS)
    trainer = -2.0 * torch.rand(r, dtype=torch.float64, generator=g) - 0.05
    engine = trainer + 1.2 * torch.randn(r, dtype=torch.float64, generator=g)
    now = trainer + 0.5 * torch.randn(r, dtype=torch.float64, generator=g)
    # One token that the engine gave a sixth of its probability to.
    engine[1] = trainer[1] - math.log(6)
    engine, now = engine.clamp(max=-0.01), now.clamp(max=-0.01)
    if config.algorithm.minibatches_per_step == 1:
        now = trainer
    lengths, mask = torch.tensor(LENGTHS), torch.ones(r, dtype=torch.bool)
    ids = torch.repeat_interleave(torch.arange(4), lengths)
    from_engine = config.algorithm.old_log_probs is OldLogProbs.engine
    correction = config.algorithm.correction
    factors = None
    if correction.kind != "none":
        factors = correct(trainer, engine, mask, lengths, correction).weights
    settings: Any = plan_step(config, 1)
    weights = sequence_weights(
        settings.aggregation, lengths, torch.tensor(GROUPS), aggregation_constant(config)
    )[ids]
    inputs = LossInputs(
        log_probs=now,
        old_log_probs=engine if from_engine else trainer,
        engine_log_probs=engine,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[ids],
        mask=mask,
        weights=weights,
        sequence_ids=ids,
        policy_factors=factors,
    )
    kinds = {"now": now, "trainer": trainer, "engine": engine}
    tokens = {name: per_sequence(values.tolist()) for name, values in kinds.items()}
    return float(policy_objective(inputs, settings.objective).loss), tokens


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def test_luspo_multiplies_each_sequence_by_its_length() -> None:
    loss, t = objective(compose("LUSPO"))
    want = 0.0
    for now, old, advantage in zip(t["now"], t["trainer"], ADVANTAGES, strict=True):
        s = math.exp(sum(a - b for a, b in zip(now, old, strict=True)) / len(now))
        want += len(now) * clipped(s, advantage, 3e-4, 4e-4) / 4
    assert loss == pytest.approx(want, rel=1e-9)


def test_scalerl_is_cispo_with_a_mean_over_prompts_and_the_batch_deviation() -> None:
    config = compose("ScaleRL")
    loss, t = objective(config)
    sums = {0: 0.0, 1: 0.0}
    tokens = {0: 0, 1: 0}
    for now, old, advantage, group in zip(t["now"], t["trainer"], ADVANTAGES, GROUPS, strict=True):
        tokens[group] += len(now)
        sums[group] += sum(
            -min(math.exp(a - b), 5.0) * advantage * a for a, b in zip(now, old, strict=True)
        )
    assert loss == pytest.approx(sum(sums[g] / tokens[g] for g in sums) / 2, rel=1e-9)
    assert config.algorithm.advantage == "batch_std"
    assert config.algorithm.filter.keep == "variance"
    assert config.precision.lm_head_dtype.value == "float32"


def test_decoupled_ppo_clips_against_one_policy_and_weighs_by_the_other() -> None:
    loss, t = objective(compose("decoupled PPO"))
    want, left_out = 0.0, 0
    for now, old, engine, a in zip(t["now"], t["trainer"], t["engine"], ADVANTAGES, strict=True):
        for x, y, z in zip(now, old, engine, strict=True):
            weight = math.exp(y - z)
            left_out += weight > 5
            want += (weight if weight <= 5 else 0.0) * clipped(math.exp(x - y), a, 0.2, 0.2)
    assert left_out
    assert loss == pytest.approx(want / sum(LENGTHS), rel=1e-9)


def test_tis_reinforce_is_the_policy_gradient_with_a_truncated_weight() -> None:
    loss, t = objective(compose("TIS-REINFORCE"))
    want = 0.0
    for old, engine, a in zip(t["trainer"], t["engine"], ADVANTAGES, strict=True):
        for y, z in zip(old, engine, strict=True):
            want += -min(math.exp(y - z), 2.0) * a * y
    assert loss == pytest.approx(want / sum(LENGTHS), rel=1e-9)


def test_dppo_of_prime_rl_masks_by_the_difference_of_probabilities_to_the_engine() -> None:
    config = compose("DPPO of prime-rl")
    loss, t = objective(config)
    want, masked = 0.0, 0
    for now, engine, a in zip(t["now"], t["engine"], ADVANTAGES, strict=True):
        for x, z in zip(now, engine, strict=True):
            moved = math.exp(x) - math.exp(z)
            drop = moved > 0.2 if a > 0 else moved < -0.2
            masked += drop
            want += 0.0 if drop else -math.exp(x - z) * a
    assert masked
    assert loss == pytest.approx(want / sum(LENGTHS), rel=1e-9)
    assert config.algorithm.advantage == "dr_grpo"
