import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.data import ProblemStream
from rlmath.data.files import read_rows
from rlmath.data.mixture import MixedStream, stream_of
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


A = [Problem(f"a.jsonl:{i}", "?", (1,), ("2",)) for i in range(1, 11)]
B = [Problem(f"b.jsonl:{i}", "?", (1,), ("2",)) for i in range(1, 4)]


def files(problems):
    return Counter(problem.id.split(".")[0] for problem in problems)


@pytest.mark.parametrize("weights", [[3, 1], [1, 1], [0.2, 0.8]])
def test_shares_hold_at_every_moment(weights):
    stream = MixedStream([A, B], weights)
    drawn = []
    for n in range(1, 60):
        drawn += stream.next(1)
        share = weights[0] / sum(weights)
        assert abs(files(drawn)["a"] - share * n) <= 1
    # Every problem of the short file comes once before any comes again.
    of_b = [p.id for p in drawn if p.id.startswith("b")]
    assert all(len(set(of_b[i : i + 3])) == 3 for i in range(0, len(of_b) - 2, 3))


def test_data_mixture_resumes_from_a_saved_position():
    stream, other = (stream_of([*A, *B], [2, 1], 7, True) for _ in range(2))
    assert stream.next(2) + stream.next(5) == other.next(7)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of([*A, *B], [2, 1], 7, True)
    resumed.load_state_dict(state)
    assert resumed.next(20) == stream.next(20)
    with pytest.raises(UserError, match="train_weights was"):
        stream_of([*A, *B], [1, 1], 7, True).load_state_dict(state)
    plain = stream_of([*A, *B], [], 7, True)
    with pytest.raises(UserError, match="was empty"):
        stream_of([*A, *B], [1, 1], 7, True).load_state_dict(plain.state_dict())


def test_a_file_that_gives_nothing_is_refused():
    with pytest.raises(UserError, match="2 weights, but problems are left of 1 files"):
        stream_of(A, [1, 1], 0, True)


@pytest.mark.process  # The library takes seconds to import.
def test_a_data_set_in_the_hubs_form(tmp_path, monkeypatch):
    # The variable HF_HUB_OFFLINE is read at the import; online, a set that does not exist is asked
    # for again and again.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"q": "1+1", "a": "2"}\n{"q": "1+2", "a": "3"}\n')
    rows = list(read_rows([f"hub:{folder}::train"]))
    assert [row.fields["a"] for row in rows] == ["2", "3"]
    assert rows[1].place == f"hub:{folder}::train:2"
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(["hub:no/such_set"]))
    with pytest.raises(UserError, match="write hub:"):
        list(read_rows(["hub:a:b:c:d"]))
