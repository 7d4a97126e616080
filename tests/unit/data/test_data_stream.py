import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.data import ProblemStream
from rlmath.data.mixture import stream_of
from rlmath.errors import UserError
from rlmath.types import Problem

PROBLEMS = [Problem(f"a.jsonl:{n}", f"{n}?", (n,), (str(n),)) for n in range(1, 8)]
# Two runs of one seed on different machines must agree, so the order itself is written down.
ORDER = ["1", "7", "2", "5", "6", "4", "3", "3", "1"]


def ids(problems):
    return [problem.id for problem in problems]


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 3), st.booleans())
def test_the_order_does_not_depend_on_how_many_are_asked_for(sizes, seed, shuffle):
    pieces, whole = (ProblemStream(PROBLEMS, seed, shuffle) for _ in range(2))
    drawn = [problem for size in sizes for problem in pieces.next(size)]
    assert ids(drawn) == ids(whole.next(sum(sizes)))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3))
def test_a_resumed_stream_continues_where_it_stopped(before, after, seed):
    stream = ProblemStream(PROBLEMS, seed)
    stream.next(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ProblemStream(PROBLEMS, seed)
    resumed.next(3)
    resumed.load_state_dict(state)
    assert resumed.taken == before
    assert ids(resumed.next(after)) == ids(stream.next(after))


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own():
    stream = ProblemStream(PROBLEMS, seed=1)
    epochs = [ids(stream.next(len(PROBLEMS))) for _ in range(4)]
    assert all(Counter(epoch) == Counter(ids(PROBLEMS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert stream.epoch == 4.0 and len(stream) == 7
    assert ids(ProblemStream(PROBLEMS, seed=2).next(7)) != epochs[0]


def test_without_shuffling_the_order_is_the_files():
    assert ids(ProblemStream(PROBLEMS, shuffle=False).next(14)) == ids(PROBLEMS) * 2


def test_the_order_of_a_seed_is_the_same_on_every_machine():
    assert [problem.answers[0] for problem in ProblemStream(PROBLEMS, seed=0).next(9)] == ORDER


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ProblemStream(PROBLEMS[:6]), "number of problems .* was 7 and is 6"),
        (ProblemStream(PROBLEMS[::-1]), "fingerprint"),
        (ProblemStream(PROBLEMS, seed=5), "data.seed was 0 and is 5"),
        (ProblemStream(PROBLEMS, shuffle=False), "data.shuffle was True and is False"),
    ],
)
def test_a_place_in_other_data_is_refused(other, message):
    with pytest.raises(UserError, match=message):
        other.load_state_dict(ProblemStream(PROBLEMS).state_dict())


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ProblemStream([])


@pytest.mark.parametrize("mixed", [False, True])
def test_changed_prompts_warn_once_on_resume(mixed, caplog):
    def stream(token):
        items = [Problem(f"a:{n}", "", (token, n), ("1",)) for n in range(4)]
        return stream_of(items, [1.0] if mixed else [], 0, True)

    saved = stream(7).state_dict()
    assert saved["fingerprint"] == stream(8).state_dict()["fingerprint"]
    stream(7).load_state_dict(saved)
    assert not caplog.records
    other = stream(8)
    other.load_state_dict(saved)
    other.load_state_dict(saved)
    (record,) = caplog.records
    assert "data.template_date" in record.getMessage()
    del saved["prompts"]  # Of an earlier version.
    stream(8).load_state_dict(saved)
    assert len(caplog.records) == 1
