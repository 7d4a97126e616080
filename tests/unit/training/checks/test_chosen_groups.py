from types import SimpleNamespace

import pytest

from rlmath.config.load import load
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.chosen import ChosenGroups, equal_groups
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample


def group(name, rewards):
    samples = []
    for index, reward in enumerate(rewards):
        right = None if reward is None else reward > 0
        status = "correct" if right else "wrong"
        samples.append(GradedSample(make_sample(name, index, 3), reward, right, status))
    return Group(Problem(name, "", (1,), ("1",)), tuple(samples))


def test_groups_of_equal_rewards_are_named_where_the_filter_drops_them():
    mixed, equal = group("a", (1.0, 0.5)), group("b", (1.0, 1.0, None))
    assert equal_groups("all", [equal]) == [] == equal_groups("variance", [mixed])
    assert (
        "1 of 2 groups have equal rewards (such as those of problem b)"
        in (equal_groups("variance", [mixed, equal])[0])
    )
    assert "equal grades (such as those of problem a)" in equal_groups("accuracy", [mixed])[0]


def step(check, number, groups, *settings):
    run = SimpleNamespace(config=load(["experiment=quickstart", *settings]))
    now = SimpleNamespace(run=run, monitor=None, step=number, finished=groups, groups=groups)
    check.before_update(now)


def groups_of(names):
    return [group(name, (0.0, 1.0)) for name in names]


def test_problems_of_the_last_step_in_its_order_are_named():
    names, check = "abcdefghijklmnop", ChosenGroups()
    step(check, 1, groups_of(names))
    step(check, 2, groups_of("ba" + names[2:]))
    with pytest.raises(InvariantError, match="first 16 problems are those of the last step"):
        step(check, 3, groups_of("ba" + names[2:]))
    check = ChosenGroups()
    for number in (1, 2, 3):
        step(check, number, groups_of(names), "data.shuffle=false")


def test_few_problems_may_come_in_one_order_twice_by_chance():
    check = ChosenGroups()
    for number in (1, 2):
        step(check, number, groups_of("abcdefgh"))
    with pytest.raises(InvariantError):
        step(check, 3, groups_of("abcdefgh"))


@pytest.mark.parametrize(
    "names", ["aaaaaaaa", "abababab", "a", "", [f"{one}.jsonl:1" for one in "abcdefgh"]]
)
def test_data_that_has_one_order_may_come_in_it(names):
    """Fewer problems than a step has, and files of one problem each, mixed in shares."""
    check = ChosenGroups()
    for number in range(1, 5):
        step(check, number, groups_of(names))


def test_groups_from_before_a_resume_may_have_passed_another_filter():
    groups, keep = [group("a", (1.0, 1.0))], "algorithm.filter.keep=variance"
    step(ChosenGroups(), 5, groups, keep)
    with pytest.raises(InvariantError, match="equal rewards"):
        step(ChosenGroups(), 1, groups, keep)
