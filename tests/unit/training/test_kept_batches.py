import dataclasses
import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlmath.actor.token_traces import TokenTrace
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.model.parallel import Layout
from rlmath.monitor.samples import drop_samples_after, limit_samples, priority
from rlmath.monitor.token_files import read_tokens, read_traced, token_file
from rlmath.training import kept_batches
from rlmath.training.controllers import Coefficients
from rlmath.training.kept_batches import KeptBatches, read_step
from rlmath.training.kept_files import FOLDER, kept_file, kept_files
from rlmath.training.step_batch import StepBatch
from rlmath.training.token_traces import traced_places, write_traces
from rlmath.types import GradedSample, Group, Problem, Sample, TrainingBatch

CONFIG = load(
    [
        *("model.path=tiny", "runner.run_dir=r", "actor.num_threads=2"),
        *("algorithm.truncated=mask", "algorithm.filter.mask_duplicates=true"),
    ]
)


def sample(problem, index, length, spans=((4, 0),), **more):
    draw = np.random.default_rng(index)
    tokens, log_probs = draw.integers(0, 2**17, length, np.int32), -draw.random(length, np.float32)
    finish = "length" if index == 1 else "stop"
    return Sample(problem, index, tokens, log_probs, "", finish, spans, index, 0, **more)


def groups(spans=((3, 0), (4, 2)), **more):
    """Two rewards; one sample that nothing could score, one whose second reward failed.

    Args:
        more: Other fields of the last sample of each.
    """
    scores = [(1.0, {"math": 1.0, "format": 0.0}), (None, {}), (0.1, {"math": 0.1, "format": None})]
    found = []
    for name, prompt in (("a.jsonl:1", (1, 2, 3)), ("b/x", (7,))):
        samples = [sample(name, i, 5 + i) for i in range(2)]
        samples.append(sample(name, 2, 7, spans, **more))
        graded = [
            GradedSample(one, reward, None, "ungraded", rewards=each)
            for one, (reward, each) in zip(samples, scores, strict=True)
        ]
        found.append(Group(Problem(name, "?", prompt, ("2",)), tuple(graded)))
    return found


def ranks():
    layout = SimpleNamespace(actor=Layout(2, 1, 3, pipeline_layers=(4,)), device=Device.cpu)
    return SimpleNamespace(config=CONFIG, layout=layout)


def batch_of(given, teacher=None):
    items = [SimpleNamespace(label=name, weight=w) for name, w in (("math", 1.0), ("format", 0.0))]
    rewards = SimpleNamespace(items=items)
    return StepBatch.of(CONFIG.algorithm, given, rewards, 4, teacher)


def keep(folder, *steps, keep_gib=1.0, after=0, **made):
    kept = KeptBatches(folder / FOLDER, keep_gib, after)
    coefficients = Coefficients(CONFIG.algorithm)
    coefficients.kl_coef, coefficients.entropy_coef = 0.1 + 0.2, 1 / 3
    for step in steps:
        kept.keep(step, batch_of(groups(**made)), coefficients, ranks())
    kept.close()


def steps_in(folder):
    return sorted(kept_files(folder / FOLDER))


def test_a_teachers_log_probs_come_back_bit_for_bit(tmp_path):
    given = groups()
    teacher = [s.sample.log_probs - 0.1 for group in given for s in group.samples]
    kept = KeptBatches(tmp_path / FOLDER, 1.0)
    batch = batch_of(given, teacher)
    kept.keep(3, batch, Coefficients(CONFIG.algorithm), ranks())
    kept.close()
    again = read_step(kept_file(tmp_path / FOLDER, 3)).batch
    found = again.sequences.select(range(6))
    assert found.teacher_log_probs.numpy().tobytes() == np.concatenate(teacher).tobytes()
    # A rank's share of it, as it is assigned.
    part = found.select([4, 1]).part(1, 1)
    assert part.teacher_log_probs.tolist() == teacher[1].tolist()


# A share without a sequence of two versions, with segments or with routes.
NOTHING = {
    "token_ages": lambda ages: not ages.any(),
    "model_mask": torch.all,
    "routes": lambda routes: not routes.numel(),
    "route_lengths": lambda lengths: not lengths.any(),
}
ROUTES = np.arange(7 * 2 * 2, dtype=np.uint8).reshape(7, 2, 2)


@pytest.mark.parametrize(
    "made",
    [
        {"spans": ((4, 0),)},
        {"spans": ((3, 0), (4, 2))},
        {"segments": (("model", 0), ("observation", 3), ("model", 5)), "texts": ("a", "b", "c")},
        {"routes": ROUTES},
    ],
    ids=lambda made: next(iter(made)),
)
def test_a_batch_comes_back_bit_for_bit(tmp_path, made):
    keep(tmp_path, 7, **made)
    found = read_step(kept_file(tmp_path / FOLDER, 7))
    wanted = batch_of(groups(**made))
    whole = wanted.sequences.select([2])
    assert (whole.model_mask is not None) == ("segments" in made)
    assert (whole.routes is not None) == ("routes" in made)
    assert (found.kl_coef, found.entropy_coef) == (0.1 + 0.2, 1 / 3)
    assert found.layout == {
        **dataclasses.asdict(Layout(2, 1, 3)),
        "pipeline_layers": [4],
        "device": "cpu",
        "threads": 2,
    }
    batch = found.batch
    assert batch.keys == wanted.keys and batch.weights_version == 4
    assert batch.keys[3:] == ("b/x/0", "b/x/1", "b/x/2")
    assert torch.equal(batch.takes_part, wanted.takes_part)
    assert batch.takes_part.tolist() == [True, False, True] * 2
    for name in ("totals", "separate"):
        mine, theirs = getattr(batch.rewards, name), getattr(wanted.rewards, name)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert batch.rewards.weights == {"math": 1.0, "format": 0.0}
    # Any share of it is what the samples themselves give.
    for rows in ([0, 1, 2, 3, 4, 5], [4, 2], [1]):
        one, other = batch.sequences.select(rows), wanted.sequences.select(rows)
        for field in dataclasses.fields(TrainingBatch):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if theirs is None and field.name in NOTHING:
                assert mine is None or NOTHING[field.name](mine), field.name
                continue
            assert (mine is None) == (theirs is None), field.name
            if mine is not None:
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), field.name


def test_the_oldest_go_at_the_limit(tmp_path, capsys):
    keep(tmp_path, 1)
    size = kept_file(tmp_path / FOLDER, 1).stat().st_size
    keep(tmp_path, *range(2, 10), keep_gib=3.5 * size / 2**30, after=1)
    assert steps_in(tmp_path) == [7, 8, 9]
    assert "runner.replay_keep_gib" not in capsys.readouterr().err
    keep(tmp_path, 10, 11, keep_gib=0.5 * size / 2**30, after=9)
    assert steps_in(tmp_path) == []
    assert capsys.readouterr().err.count("runner.replay_keep_gib") == 1


def test_batches_are_not_kept_at_0(tmp_path):
    keep(tmp_path, 1, 2, keep_gib=0.0)
    assert not (tmp_path / FOLDER).exists()


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path):
    keep(tmp_path, 1, 2, 3, 4)
    keep(tmp_path, after=2)
    assert steps_in(tmp_path) == [1, 2]
    keep(tmp_path, after=0)
    assert steps_in(tmp_path) == []


def test_partial_batch_of_a_killed_process_is_removed(tmp_path, monkeypatch):
    keep(tmp_path, 1)
    before = kept_file(tmp_path / FOLDER, 1).read_bytes()

    def interrupt(file, *_):
        file.write(b"half")
        file.flush()
        os.link(file.name if isinstance(file.name, str) else _path_of(tmp_path), tmp_path / "left")
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_batches, "write_arrays", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, 1, after=1)
    assert kept_file(tmp_path / FOLDER, 1).read_bytes() == before
    # SIGKILL would have left the file under the name that it had.
    (tmp_path / "left").rename(tmp_path / FOLDER / ".step_000001.bin.x1y2z3")
    keep(tmp_path, after=1)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_000001.bin"]


def _path_of(folder):
    """Path of the file that is being written."""
    (path,) = (folder / FOLDER).glob(".step_*")
    return path


def test_a_full_disk_costs_the_batches_and_not_the_run(tmp_path, monkeypatch, capsys):
    """The partial file is gone; one warning for any number of steps."""
    write = kept_batches.write_arrays

    def full(file, header, arrays):
        if header["step"] in (2, 3):
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, header, arrays)

    monkeypatch.setattr(kept_batches, "write_arrays", full)
    keep(tmp_path, 1, 2, 3, 4)
    assert steps_in(tmp_path) == [1, 4]
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    assert capsys.readouterr().err.count("No space left") == 1


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


def test_token_traces_are_read_unchanged(run_dir):
    assert [step for step, _ in read_traced(run_dir)] == [4, 5]
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
    assert [step for step, _ in read_traced(run_dir)] == [5]


def test_token_traces_are_dropped_with_their_samples(run_dir):
    drop_samples_after(run_dir, 4)
    assert not token_file(run_dir, 5).exists() and token_file(run_dir, 4).exists()
    (run_dir / "samples" / "step_000006.jsonl").write_text("x" * 1000)
    limit_samples(run_dir, 1200 / 2**30)
    assert not token_file(run_dir, 4).exists()
