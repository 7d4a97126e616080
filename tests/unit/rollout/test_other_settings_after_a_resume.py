"""Groups that a checkpoint left unfinished, under settings that the run was not begun with."""

import time
from dataclasses import replace

import pytest

from rlmath.data import ProblemStream
from rlmath.engines.requests import cut_sample
from rlmath.errors import UserError
from rlmath.rollout.group_state import check_resumed_groups, group_from_state, group_to_state
from rlmath.rollout.ledger import LEDGER_FILE, Ledger, LedgerError
from rlmath.types import Group
from tests.support import fake_engines
from tests.support.fake_engines import (
    LONGEST,
    PROBLEMS,
    Engines,
    sample_from,
    sampler_of,
    through_a_checkpoint,
)
from tests.unit.rollout import test_continuous as continuous

CARRY_OVER = ("rollout.schedule=carry_over", "rollout.cut_after_tokens=4")


def run_with_carry_over(steps, collector, folder, *settings):
    """A run that leaves groups unfinished in each step, and its checkpoint."""
    sampler = sampler_of(*CARRY_OVER, *settings, ledger=Ledger(folder / LEDGER_FILE))
    for step in range(1, steps + 1):
        sample(sampler, step, collector)
    return sampler, through_a_checkpoint(sampler, folder)


def sample(sampler, step, collector):
    return fake_engines.sample(sampler, step, collector, step, spread=1.0)[0]


def resume(state, step, folder, *settings):
    sampler = sampler_of(*settings, ledger=Ledger(folder / LEDGER_FILE, step))
    sampler.load_state_dict(state)
    return sampler


PIPELINED = ("rollout.schedule=pipelined",)
SYNCHRONOUS = ("rollout.schedule=synchronous",)


def sizes(sampled):
    return [len(group.samples) for group in sampled.groups]


@pytest.mark.parametrize("group_size", [1, 4])
def test_groups_keep_the_size_that_they_were_admitted_with(group_size, collector, tmp_path):
    before, state = run_with_carry_over(2, collector, tmp_path)
    left = len(before._live)
    assert left >= 4
    size = f"algorithm.group_size={group_size}"
    sampler = resume(state, 2, tmp_path, *CARRY_OVER, size)
    found = [one for step in range(3, 8) for one in sizes(sample(sampler, step, collector))]
    kept = len(state["carried_over"])
    assert found == [2] * (left + kept) + [group_size] * (20 - left - kept)


def test_responses_stay_those_to_the_prompt_that_they_were_sampled_for(collector, tmp_path):
    """Another template, tokenizer or text of a row: what was begun is continued and trained on
    behind the prompt that the engine had."""
    before, state = run_with_carry_over(2, collector, tmp_path)
    begun = set(before._live) | {ordinal for ordinal, _ in state["carried_over"]}
    assert before._live
    sampler = sampler_of(*CARRY_OVER, ledger=Ledger(tmp_path / LEDGER_FILE, 2))
    changed = [
        replace(p, prompt="new", prompt_token_ids=(7, *p.prompt_token_ids)) for p in PROBLEMS
    ]
    sampler._stream = ProblemStream(changed)
    sampler.load_state_dict(state)
    engines = Engines(3, 2, spread=1.0)
    groups = []
    for step in range(3, 9):
        groups += sample_from(engines, sampler, step, collector).groups
    old = [group.problem for group in groups if group.problem.prompt != "new"]
    assert len(old) == len(begun)
    assert all(p.prompt_token_ids == (1, int(p.prompt[1:])) for p in old)
    assert all(g.problem.prompt_token_ids[0] == 7 for g in groups if g.problem.prompt == "new")
    continued = [one for one in engines.requests if one.begun is not None and one.begun_tokens]
    assert {one.prompt_token_ids[0] for one in continued[: len(begun)]} == {1}
    # Finished groups that wait for training.
    whole = Group(PROBLEMS[0], groups[0].samples)
    assert group_from_state(group_to_state(whole), changed[0]).problem == PROBLEMS[0]


@pytest.mark.parametrize("group_size", [1, 4])
def test_groups_of_a_continuous_run_resume_as_well(group_size, collector, tmp_path, monkeypatch):
    def parts_of(sampler):
        return continuous.Parts(collector, continuous.Pool(0.004), sampler, monkeypatch)

    path = tmp_path / LEDGER_FILE
    before = continuous.sampler_of(ledger=Ledger(path))
    first = parts_of(before)
    step = 0
    while not before._live and step < 6:  # On a busy machine the engines may be done in a step.
        step += 1
        first.step(step)
    first.source.close()
    assert before._live
    state = through_a_checkpoint(before, tmp_path)
    left = len(before._live) + len(state["carried_over"])
    after = continuous.sampler_of(f"algorithm.group_size={group_size}", ledger=Ledger(path, step))
    after.load_state_dict(state)
    second = parts_of(after)
    last = step + 4
    found = [one for now in range(step + 1, last + 1) for one in sizes(second.step(now))]
    second.source.close()
    # The filter drops a group without a scored sample, and a later group may be finished earlier.
    assert set(found) <= {2, group_size} and len(found) == 16
    assert 0 < found.count(2) <= left


@pytest.mark.parametrize(
    "settings",
    [
        (*CARRY_OVER, "rollout.max_lag=1"),
        (*CARRY_OVER, "rollout.max_lag=2"),
        (*CARRY_OVER, "rollout.max_lag=4", "algorithm.prompts_per_step=2"),
        PIPELINED,
        SYNCHRONOUS,
    ],
)
def test_groups_are_trained_that_may_not_wait_as_long_as_before(settings, collector, tmp_path):
    before, state = run_with_carry_over(5, collector, tmp_path, "rollout.max_lag=4")
    old = sorted(before._live.keys() | before._kept_since.keys())
    assert len(old) >= 12
    sampler = resume(state, 5, tmp_path, *settings)
    per_step = sampler._config.algorithm.prompts_per_step
    trained = []
    for step in range(6, 16):
        waited = sorted(sampler._live.keys() | sampler._kept_since.keys())
        assert len(sample(sampler, step, collector).groups) == per_step
        left = sampler._live.keys() | sampler._kept_since.keys()
        trained += [one for one in waited if one not in left]
        if step in (7, 9):  # Once more, with the same settings.
            state = through_a_checkpoint(sampler, tmp_path)
            sampler = resume(state, step, tmp_path, *settings)
    assert set(old) <= set(trained)


@pytest.mark.parametrize(
    "settings", [SYNCHRONOUS, (*CARRY_OVER, "rollout.max_lag=2"), PIPELINED], ids=lambda s: s[0]
)
def test_a_group_that_was_whole_and_not_graded_is_graded(settings, collector, tmp_path):
    """As ``continuous`` leaves them in a checkpoint while its grades are running."""
    before, _ = run_with_carry_over(2, collector, tmp_path, "rollout.max_lag=4")
    engines = Engines(2, 2, spread=1.0)
    for group in before._live.values():
        for request in group.take_cut(None):
            group.add(engines._answer(replace(request, budget_tokens=None)))
    whole = sorted(before._live)
    assert whole and all(group.is_complete for group in before._live.values())
    sampler = resume(through_a_checkpoint(before, tmp_path), 2, tmp_path, *settings)
    for step in range(3, 12):
        sample(sampler, step, collector)
    assert not set(whole) & (sampler._live.keys() | sampler._kept_since.keys())


def test_a_group_that_waits_longer_than_it_may_is_a_defect(collector, tmp_path):
    """Also one that was given more steps for its age."""
    _, state = run_with_carry_over(5, collector, tmp_path, "rollout.max_lag=4")
    sampler = resume(state, 5, tmp_path, *CARRY_OVER, "rollout.max_lag=1")
    sample(sampler, 6, collector)
    last = max(sampler._last_steps.values())
    assert last == 9
    sampler._check_lag(last, [])
    for group in sampler._live.values():
        sampler._kept_since[group.ordinal] = group.step
    with pytest.raises(LedgerError, match=rf"step {last + 1} trains group"):
        sampler._check_lag(last + 1, sorted(sampler._last_steps))


def open_round(sampler, step, collector, early):
    """A step whose round ends when that many groups are there for the next step."""
    engines = Engines(step, step - 1)
    work = sampler.open(step, collector)
    queue, taken = work.begin(), False
    while not taken or len(sampler._groups.carried_over) < early:
        queue += work.more(not queue)
        if not taken and work.is_ready:
            sampler.take(step)
            taken = True
        elif any(group.is_complete for group in work.unfinished.values()):
            time.sleep(0.001)  # It is being graded.
        else:
            work.take(engines._answer(queue.pop(0)))
    for request in queue:
        work.take(cut_sample(request))
    sampler.close(step)


def test_resume_refuses_a_limit_below_unfinished_responses(collector, tmp_path):
    before, state = run_with_carry_over(2, collector, tmp_path)
    assert before._live

    def settings(tokens):
        return sampler_of(f"rollout.max_response_tokens={tokens}")._config

    check_resumed_groups(settings(LONGEST), tmp_path, state)
    with pytest.raises(UserError, match=rf"max_response_tokens=39.* up to {LONGEST} tokens"):
        check_resumed_groups(settings(LONGEST - 1), tmp_path, state)
    # So are those that wait to be trained on.
    sampler = sampler_of("algorithm.prompts_per_step=2")
    sample(sampler, 1, collector)
    group = Group(PROBLEMS[0], sample(sampler, 2, collector).groups[0].samples)
    sampler._groups.set_carried_over([(0, group)])
    longest = max(len(one.sample.token_ids) for one in group.samples)
    state = sampler.state_dict()
    check_resumed_groups(settings(longest), tmp_path, state)
    with pytest.raises(UserError, match=f"has a response of {longest} tokens"):
        check_resumed_groups(settings(longest - 1), tmp_path, state)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, CARRY_OVER, PIPELINED])
def test_a_step_that_has_some_groups_already_samples_the_others(settings, collector, tmp_path):
    """The run's sampling continued while it trained."""
    before = continuous.sampler_of(ledger=Ledger(tmp_path / LEDGER_FILE))
    for step in range(1, 4):
        open_round(before, step, collector, early=3)
    state = through_a_checkpoint(before, tmp_path)
    assert len(state["carried_over"]) == 3 and state["round"]["step"] == 4
    sampler = resume(state, 3, tmp_path, *settings)
    assert sampler.round is not None and not sampler.is_sampled
    early = {group.problem.id for group in sampler.round.finished.values()}
    assert early
    sampled = sample(sampler, 4, collector)
    assert len(sampled.groups) == 4 and not sampled.shortage
    assert early <= {group.problem.id for group in sampled.finished}
