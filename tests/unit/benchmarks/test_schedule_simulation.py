"""The simulation of schedules: the real sampler under a virtual clock."""

import dataclasses

import numpy as np
import pytest

from benchmarks.simulation.lengths import Lengths, log_normal_lengths
from benchmarks.simulation.simulate import Choice, Setup, Times, simulate
from rlmath.config.load import load
from rlmath.config.rollout import Overlap

TIMES = Times(step_s=0.01, token_s=1e-6, prefill_token_s=1e-6, train_token_s=1e-5, fixed_s=2.0)
CONFIG = load(
    [
        "model.path=m",
        "runner.run_dir=r",
        "algorithm.prompts_per_step=16",
        "algorithm.group_size=4",
        "rollout.max_response_tokens=8000",
    ]
)


def played(lengths, choice, engines=4):
    setup = Setup(engines, 64, 100, lengths, TIMES)
    return simulate(CONFIG, setup, choice, steps=5)


def test_steps_of_equal_lengths_take_what_the_formula_says():
    lengths = Lengths(np.full((16, 4), 1000))
    found = played(lengths, Choice())
    # 16 samples on each of 4 engines: 1,000 steps, in the middle of which they hold 500 tokens
    # each; 100 prompt tokens of each to read; and GATHER_S.
    generate_s = 1000 * (0.01 + 1e-6 * 16 * 500) + 16 * 100 * 1e-6 + 0.1
    assert found.generate_s == pytest.approx(generate_s, rel=1e-4)
    assert found.step_s == pytest.approx(generate_s + 2 + 64 * 1100 * 1e-5, rel=1e-4)
    assert found.tokens_per_s == pytest.approx(64_000 / found.step_s)
    assert (found.idle_share, found.lag_mean, found.mixed_share) == (
        pytest.approx(0, abs=1e-2),
        0,
        0,
    )


def test_a_budget_that_no_response_reaches_changes_nothing():
    lengths = log_normal_lengths(200, 4, 1500, 8000)
    usual, budget = played(lengths, Choice()), played(lengths, Choice(Overlap(2, 8000)))
    # The first steps, which fill the schedule, are not counted: other steps are.
    assert budget.lag_mean == budget.mixed_share == budget.recomputed_share == 0
    assert budget.step_s == pytest.approx(usual.step_s, rel=0.2)
    same = played(lengths, Choice(Overlap(0, 8000)))
    assert same.step_s == usual.step_s and same.tokens_per_s == usual.tokens_per_s


def test_long_tails_are_what_carrying_over_is_for():
    draw = np.random.default_rng(0)
    tokens = np.where(draw.random((300, 4)) < 0.03, 8000, 500)
    lengths = Lengths(tokens)
    usual = played(lengths, Choice())
    found = {lag: played(lengths, Choice(Overlap(lag, 2000))) for lag in (1, 4)}
    assert found[4].tokens_per_s > 1.5 * usual.tokens_per_s
    assert found[4].step_s < found[1].step_s < usual.step_s
    assert 0 < found[1].lag_p99 <= 1 < found[4].lag_p99 <= 4
    # Most samples are short, and of one version.
    assert 0 < found[4].mixed_share < 0.05


def test_a_pipelined_step_takes_as_long_as_the_slower_side():
    """2 of 4 engines, and half the GPUs for the actor."""
    lengths = Lengths(np.full((16, 4), 1000))
    generate_s = 1000 * (0.01 + 1e-6 * 32 * 500) + 32 * 100 * 1e-6 + 0.1
    found = played(lengths, Choice(Overlap(1), engines=2))
    assert found.generate_s == pytest.approx(generate_s, rel=1e-4)
    assert found.step_s == pytest.approx(generate_s + 2, rel=1e-4)
    train_s = 64 * 1100 * 1e-5 / 0.5
    assert found.actor_idle_share == pytest.approx(1 - (train_s + 2) / found.step_s, rel=1e-4)
    assert (found.lag_mean, found.lag_p99, found.mixed_share) == (1, 1, 0)
    # With slow training it is the actor that the step waits for.
    slow = dataclasses.replace(TIMES, train_token_s=1e-3)
    setup = Setup(4, 64, 100, lengths, slow)
    found = simulate(CONFIG, setup, Choice(Overlap(1), engines=2), steps=5)
    assert found.step_s == pytest.approx(64 * 1100 * 1e-3 / 0.5 + 2, rel=1e-4)
    assert found.actor_idle_share == pytest.approx(0, abs=1e-6)


def test_computing_takes_its_time_for_each_sequence():
    times = dataclasses.replace(TIMES, sequence_s=1e-3)
    setup = Setup(4, 64, 100, Lengths(np.full((16, 4), 1000)), times)
    found = simulate(CONFIG, setup, Choice(), steps=5)
    assert found.generate_s == pytest.approx(
        1000 * (0.01 + 1e-3 * 16 + 1e-6 * 16 * 500) + 16 * 100 * 1e-6 + 0.1, rel=1e-4
    )


def test_what_both_lose_while_they_work_at_the_same_time():
    """A quarter of it: the engines work for as long as the actor, or end before it."""
    lengths, quarter = Lengths(np.full((16, 4), 1000)), 0.25
    generate_s = 1000 * (0.01 + 1e-6 * 16 * 500) + 16 * 100 * 1e-6 + 0.1
    # Three times as long as engines work alone.
    train_s = 3 * generate_s
    times = dataclasses.replace(
        TIMES, train_token_s=train_s / (64 * 1100), contended_share=quarter, fixed_s=1.0
    )

    def step_s(choice):
        return simulate(CONFIG, Setup(4, 64, 100, lengths, times), choice, steps=5).step_s

    assert step_s(Choice()) == pytest.approx(generate_s + train_s + 1, rel=1e-3)
    pipelined = Choice(Overlap(1))
    beside_s = generate_s / (1 - quarter)
    continuous = Choice(Overlap(2, 0))
    for choice in (pipelined, continuous):
        assert step_s(choice) == pytest.approx(train_s + quarter * beside_s + 1, rel=1e-2)
    # Engines that take longer than the actor are alone at the end.
    times = dataclasses.replace(times, train_token_s=generate_s / 3 / (64 * 1100))
    beside_s = generate_s / 3 / (1 - quarter)
    assert step_s(pipelined) == pytest.approx(generate_s + quarter * beside_s + 1, rel=1e-2)


def test_engines_sample_beside_what_a_step_has_to_prepare():
    """And not beside the weight sync; a schedule that takes turns waits for both."""
    lengths = Lengths(np.full((16, 4), 1000))
    generate_s = 1000 * (0.01 + 1e-6 * 16 * 500) + 16 * 100 * 1e-6 + 0.1
    train_s = generate_s / 2
    times = dataclasses.replace(
        TIMES, train_token_s=train_s / (64 * 1100), fixed_s=1.0, prepare_s=generate_s / 4
    )

    def step_s(choice, **more):
        told = Setup(4, 64, 100, lengths, dataclasses.replace(times, **more))
        return simulate(CONFIG, told, choice, steps=5).step_s

    assert step_s(Choice()) == pytest.approx(1.75 * generate_s + 1, rel=1e-3)
    pipelined = Choice(Overlap(1))
    assert step_s(pipelined) == pytest.approx(generate_s + 1, rel=1e-2)
    continuous = Choice(Overlap(2, 0))
    # Where the actor is what is waited for, it is its time.
    for choice in (pipelined, continuous):
        found = step_s(choice, prepare_s=generate_s)
        assert found == pytest.approx(1.5 * generate_s + 1, rel=2e-2)


def test_lengths():
    lengths = log_normal_lengths(2000, 8, 3000, 10_000)
    assert lengths.tokens.mean() == pytest.approx(3000, rel=0.03)
    assert lengths.tokens.max() == 10_000 and lengths.tokens.min() >= 1
