import itertools
import math

import plain_algorithms as plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms.advantages import ADVANTAGES, gae, gdpo, get_advantage, grpo
from rlmath.algorithms.advantages.base import EpsilonOptions
from rlmath.algorithms.advantages.grpo import GrpoOptions

NAN = float("nan")
COUNTED = ("reinforce_pp", "reinforce_pp_baseline")

ESTIMATORS = ADVANTAGES.having(lambda one: not one.needs_values)


def run(name, rewards, group_ids, counts=None, dtype=torch.float64, **settings_):
    counts = [1] * len(rewards) if counts is None else counts
    out = get_advantage(name)(
        torch.tensor(rewards, dtype=dtype),
        torch.tensor(group_ids),
        ADVANTAGES.options(name)(**settings_),
        token_counts=torch.tensor(counts),
    )
    return out.tolist()


def test_reinforce_pp_weighs_sequences_by_their_tokens():
    # Rewards 1 (3 tokens) and 0 (1 token): mean 3/4, Bessel's variance 3/4 / 3 = 1/4.
    got = run("reinforce_pp", [1.0, 0.0], [0, 1], counts=[3, 1])
    assert got == pytest.approx([0.5, -1.5], abs=1e-5)


def test_the_deviation_of_the_others():
    """Bessel's over the other samples; where these are equal the difference stays as it is."""
    rewards = [1.0, 0.0, 0.5, 0.25, 2.0]
    got = run("grpo", rewards, [0] * 5, leave_one_out=True, leave_one_out_std=True)
    for i, reward in enumerate(rewards):
        others = torch.tensor(rewards[:i] + rewards[i + 1 :], dtype=torch.float64)
        want = (reward - others.mean()) / (others.std() + 1e-6)
        assert got[i] == pytest.approx(float(want), rel=1e-9)
    # 0.1 is no binary fraction, so what is left of equal rewards is rounding.
    for wrong in (0.0, 0.1):
        got = run("grpo", [1.1, *[wrong] * 7], [0] * 8, leave_one_out=True, leave_one_out_std=True)
        assert got[0] == pytest.approx(1.1 - wrong)
    assert run("grpo", [1.0, 0.0], [0, 0], leave_one_out_std=True) == [0.5, -0.5]


def test_gdpo_tells_combinations_apart_that_a_sum_does_not():
    # Both wrong samples of group 0 sum to 1, by different rewards whose spread differs.
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    got = gdpo(table, torch.zeros(4, dtype=torch.int64), EpsilonOptions())
    assert got[0] != pytest.approx(float(got[1]))
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        gdpo(table, torch.zeros(4, dtype=torch.int64), EpsilonOptions(), weights=[1, 1, 1])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(name):
    # 0.1 is no binary fraction: 0.1 + 0.1 + 0.1 is not 3 times 0.1.
    assert run(name, [0.1] * 3, [0] * 3) == [0.0] * 3
    assert run(name, [0.1] * 7, [0] * 7, dtype=torch.float32) == [0.0] * 7


@pytest.mark.parametrize("name", ESTIMATORS)
def test_unscored_samples_get_zero_and_change_nothing(name):
    rewards, groups, counts = [1.0, -1.0, 1.0, 0.0, 1.0], [0, 0, 0, 1, 1], [3, 1, 2, 5, 4]
    without = run(name, rewards, groups, counts)
    got = run(name, [*rewards, NAN, NAN], [*groups, 1, 2], [*counts, 9, 9])
    assert got[5:] == [0.0, 0.0]
    assert got[:5] == pytest.approx(without, abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_rewards_give_float32_advantages(name):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    got = get_advantage(name)(
        rewards,
        torch.tensor([0, 0, 1, 1]),
        ADVANTAGES.options(name)(),
        token_counts=torch.ones(4, dtype=torch.int64),
    )
    assert got.dtype == torch.float32
    assert got.isfinite().all()


REWARDS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([5.0, -5.0, 0.1]), st.floats(-10, 10), st.just(NAN)),
        st.integers(0, 4),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=24,
)
PLAIN = {
    "grpo": lambda r, g, n: plain.grpo(r, g),
    "dr_grpo": lambda r, g, n: plain.dr_grpo(r, g),
    "rloo": lambda r, g, n: plain.rloo(r, g),
    "reinforce_pp": plain.reinforce_pp,
    "reinforce_pp_baseline": plain.reinforce_pp_baseline,
    "batch_std": lambda r, g, n: plain.batch_std(r, g),
    "pass_at_k": lambda r, g, n: plain.pass_at_k(r, g, 4),
    "gdpo": lambda r, g, n: plain.gdpo([[v] for v in r], g, [1.0]),
    "teacher": lambda r, g, n: [0.0] * len(r),
}


def test_each_estimator_has_a_straightforward_twin():
    assert sorted(PLAIN) == ESTIMATORS


def well_separated(rewards):
    """Differences of rounding errors alone would be divided by epsilon in both versions."""
    values = sorted(r for r in rewards if not math.isnan(r))
    return all(b == a or b - a > 1e-3 for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("name", sorted(PLAIN))
@given(REWARDS)
def test_agrees_with_a_straightforward_implementation(name, batch):
    rewards, groups, counts = (list(column) for column in zip(*batch, strict=True))
    if not well_separated(rewards):
        return
    want = PLAIN[name](rewards, groups, counts)
    got = run(name, rewards, groups, counts)
    assert got == pytest.approx(want, rel=1e-10, abs=1e-10)


def test_gdpo_agrees_with_several_rewards():
    torch.manual_seed(0)
    table = torch.randn(20, 3, dtype=torch.float64)
    table[2, 1] = NAN
    table[5] = NAN
    groups = torch.arange(20) % 4
    want = plain.gdpo(table.tolist(), groups.tolist(), [1.0, 0.5, 2.0])
    assert gdpo(table, groups, EpsilonOptions(), weights=[1.0, 0.5, 2.0]).tolist() == pytest.approx(
        want, rel=1e-10
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@given(REWARDS, st.randoms(use_true_random=False))
def test_the_order_of_samples_makes_no_difference(name, batch, rng):
    if not well_separated([r for r, _, _ in batch]):
        return
    order = list(range(len(batch)))
    rng.shuffle(order)
    columns = [list(c) for c in zip(*batch, strict=True)]
    straight = run(name, *columns)
    shuffled = run(name, *[[c[i] for i in order] for c in columns])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "teacher"])
def test_estimators_that_need_only_the_groups_rewards(name):
    rewards, ids, counts = [1.0, 0.0, 0.0, 0.5, 0.25, NAN], [4, 4, 4, 1, 1, 1], [3, 1, 2, 5, 1, 2]
    alone = [
        *run(name, rewards[:3], ids[:3], counts[:3]),
        *run(name, rewards[3:], ids[3:], counts[3:]),
    ]
    # To the last bit.
    assert (run(name, rewards, ids, counts) == alone) == ADVANTAGES.traits(name).within_groups


def test_missing_token_counts_are_asked_for():
    for name in COUNTED:
        with pytest.raises(ValueError, match=f"{name}.*token_counts"):
            get_advantage(name)(torch.tensor([1.0]), torch.tensor([0]), EpsilonOptions())


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"advantage = 'grop'.*grpo.*rloo"):
        get_advantage("grop")
    with pytest.raises(ValueError, match=r"\[2\].*\[3\]"):
        grpo(torch.ones(2), torch.zeros(3, dtype=torch.int64), GrpoOptions())
    with pytest.raises(ValueError, match="reward 1 is infinite"):
        grpo(torch.tensor([1.0, math.inf]), torch.tensor([0, 0]), GrpoOptions())


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 99),
)
def test_gae_agrees_with_its_definition(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    r, v = torch.randn(2, sum(lengths), dtype=torch.float64, generator=generator)
    want = plain.gae(r.tolist(), v.tolist(), lengths, gamma, lam)
    advantages, returns = gae(r, v, torch.tensor(lengths), gamma=gamma, lam=lam)
    assert advantages.tolist() == pytest.approx(want, rel=1e-10, abs=1e-10)
    assert torch.equal(returns, advantages + v)


def test_gae_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="5 tokens, but there are 4 rewards"):
        gae(torch.zeros(4), torch.zeros(5), torch.tensor([2, 3]), gamma=1.0, lam=1.0)
