import json
from collections import Counter

import pytest

from rlmath.data.files import read_rows
from rlmath.data.mixture import MixedStream, stream_of
from rlmath.errors import UserError
from rlmath.types import Problem

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
