"""Which samples are traced, and what stays on the disk of what was traced."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.token_traces import TokenTrace
from rlmath.config.load import load
from rlmath.monitor.samples import drop_samples_after, limit_samples, priority
from rlmath.monitor.token_files import read_tokens, token_file, traced_in
from rlmath.training.token_traces import traced_places, write_traces


def test_the_first_sample_of_the_same_problems_in_every_step():
    keys = [f"data/p:{problem}/{index}" for problem in (3, 1, 2, 5) for index in (0, 1)]
    by_priority = sorted(("data/p:3", "data/p:1", "data/p:2", "data/p:5"), key=priority)
    found = [keys[place] for place in traced_places(keys, 2)]
    assert found == [f"{problem}/0" for problem in by_priority[:2]]
    again = [keys[::-1][place] for place in traced_places(keys[::-1], 2)]
    assert [one.rpartition("/")[0] for one in again] == by_priority[:2]
    assert traced_places(keys, 0) == () and len(traced_places(keys, 9)) == 4


@pytest.fixture
def run_dir(tmp_path):
    config = load(["experiment=quickstart", "model.path=tiny", f"runner.run_dir={tmp_path}"])
    (tmp_path / "samples").mkdir()
    batch = SimpleNamespace(
        keys=("a/0", "b/0"), sequences=SimpleNamespace(weights_versions=torch.tensor([3, 4]))
    )
    monitor = SimpleNamespace(run_dir=tmp_path)
    for step in (4, 5):
        traces = [
            TokenTrace(
                place,
                place,
                place == 1,
                0.5,
                {
                    "token_ids": torch.arange(2 + place, dtype=torch.int32),
                    "pulls": torch.full((2 + place,), step / 7),
                    "loss_mask": torch.tensor([True, False, True][: 2 + place]),
                },
            )
            for place in (1, 0)
        ]
        write_traces(config, batch, traces, monitor, step)
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").write_text("x" * 1000)
    return tmp_path


def test_they_are_read_as_they_were(run_dir):
    assert [step for step, _ in traced_in(run_dir)] == [4, 5]
    (first, values), (second, others) = read_tokens(run_dir, 5)
    assert (first.key, first.tokens, first.version, first.discarded) == ("a/0", 2, 3, False)
    assert (second.key, second.tokens, second.minibatch, second.discarded) == ("b/0", 3, 1, True)
    assert values["token_ids"].tolist() == [0, 1] and others["token_ids"].tolist() == [0, 1, 2]
    assert others["pulls"].tolist() == torch.full((3,), 5 / 7).tolist()
    assert others["loss_mask"].tolist() == [True, False, True]


def test_a_damaged_file_is_as_none(run_dir):
    path = token_file(run_dir, 4)
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_tokens(run_dir, 4)) == [] and list(read_tokens(run_dir, 9)) == []
    path.write_bytes(b"")
    assert [step for step, _ in traced_in(run_dir)] == [5]


def test_they_go_with_the_steps_samples(run_dir):
    drop_samples_after(run_dir, 4)
    assert not token_file(run_dir, 5).exists() and token_file(run_dir, 4).exists()
    (run_dir / "samples" / "step_000006.jsonl").write_text("x" * 1000)
    limit_samples(run_dir, 1200 / 2**30)
    assert not token_file(run_dir, 4).exists()
