import gzip
import json
from dataclasses import replace

import pytest

from rlmath.monitor import read_samples, write_samples
from rlmath.monitor.files import replacing
from rlmath.monitor.samples import limit_samples


def test_every_sample_is_in_the_file(tmp_path, group):
    dropped = {group.problem.id: "equal_rewards"}
    path = write_samples(tmp_path, 12, [group, group], dropped=dropped)
    assert path == tmp_path / "samples" / "step_000012.jsonl"
    rows = list(read_samples(path))
    assert len(rows) == 4
    assert rows[0] == {
        "step": 12,
        "problem_id": "train.jsonl:3",
        "index": 0,
        "prompt": "What is 1+1? é",
        "response": "\\boxed{2}",
        "answer": "2",
        "accepted": ["2"],
        "status": "correct",
        "method": "exact",
        "correct": True,
        "reward": 5.0,
        "rewards": {"math": 5.0},
        "dropped": "equal_rewards",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "response_tokens": 2,
        "weights_version": 4,
        "spans": [[4, 0]],
        "engine": 1,
        "seed": 11,
    }
    assert rows[1]["reward"] is None and rows[1]["rewards"] == {"math": None}
    # Half of a surrogate pair has no UTF-8; it stays as JSON's own escape of it.
    assert rows[1]["response"] == "<b>1</b>\n\ud83d"


def test_tokens_of_some_samples(tmp_path, group):
    others = [replace(group, problem=replace(group.problem, id=f"t:{i}")) for i in range(9)]
    rows = list(read_samples(write_samples(tmp_path, 1, others, token_samples=2)))
    having = [row for row in rows if "token_ids" in row]
    assert len(having) == 2 and {row["index"] for row in having} == {0}
    assert having[0]["token_ids"] == [5, 6] and having[0]["log_probs"] == [-0.1, -0.2]
    # The same problems, among others and in another order.
    again = list(read_samples(write_samples(tmp_path, 2, others[::-1], token_samples=4)))
    more = {row["problem_id"] for row in again if "token_ids" in row}
    assert {row["problem_id"] for row in having} < more


def test_large_steps_are_compressed(tmp_path, group):
    plain = write_samples(tmp_path, 1, [group], compress_above_characters=1000)
    rows = list(read_samples(plain))
    packed = write_samples(tmp_path, 1, [group], compress_above_characters=10)
    assert packed.name == "step_000001.jsonl.gz"
    assert list(read_samples(packed)) == rows
    assert [json.loads(line) for line in gzip.decompress(packed.read_bytes()).splitlines()] == rows
    assert not plain.exists()


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_the_oldest_steps_go_when_files_take_too_much(tmp_path, group):
    paths = [write_samples(tmp_path, step, [group]) for step in range(1, 5)]
    kept = write_samples(tmp_path, 1, [group], kind="eval")
    size = paths[0].stat().st_size
    limit_samples(tmp_path, 4 * size / 2**30)
    assert all(path.exists() for path in paths)
    limit_samples(tmp_path, 2.5 * size / 2**30)
    assert [path.exists() for path in paths] == [False, False, True, True]
    limit_samples(tmp_path, 0.5 * size / 2**30)
    assert [path.exists() for path in paths] == [False, False, False, True]
    assert kept.exists()
