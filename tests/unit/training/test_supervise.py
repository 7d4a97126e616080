"""When a run is started again, from where, and when no more."""

import dataclasses
import json

import pytest

from rlmath.actor.group import ActorError
from rlmath.checkpoint import CheckpointStore
from rlmath.config.load import load
from rlmath.errors import WeightsError
from rlmath.monitor.collapse import RollBack
from rlmath.training import supervise as supervision


@pytest.fixture
def config(tmp_path):
    loaded = load(["model.path=m", f"runner.run_dir={tmp_path}", "data.train_paths=[t]"])
    runner = dataclasses.replace(loaded.runner, resume="never", max_restarts=2)
    return dataclasses.replace(loaded, runner=runner)


def supervise(config, attempt):
    return list(supervision.supervise(config, attempt))


class Attempts:
    """Attempts that end as they are told: with an error, or after one event."""

    def __init__(self, store, *ends):
        self.store, self.ends, self.seen = store, list(ends), []

    def __call__(self, config):
        self.seen.append((config.runner.resume, config.actor.optimizer.lr))
        saves, end = self.ends.pop(0)
        for step in saves:
            self.store.begin(step)
            self.store.commit(step, {}, {})
            with (self.store.folder.parent / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
        if end is not None:
            raise end
        yield len(self.seen)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=10)


def test_restarts_are_counted_from_the_last_new_checkpoint(config, store, tmp_path, capsys):
    dead = ActorError("Megatron rank 1 failed: its process ended")
    attempts = Attempts(store, ([], dead), ([5], dead), ([], dead), ([], None))
    supervise(config, attempts)
    # In "never" and "auto" the first attempt starts over, and the others resume.
    assert [resume for resume, _ in attempts.seen] == ["never", "auto", "auto", "auto"]
    printed = capsys.readouterr().err
    assert "resumes from the beginning; step 1 is repeated" in printed
    assert "resumes from the checkpoint of step 5; step 6 is repeated" in printed
    lines = [json.loads(x) for x in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 6, 6]
    assert [line["choice"].split(":")[0] for line in lines] == [
        "restart 1 of runner.max_restarts=2",
        "restart 1 of runner.max_restarts=2",
        "restart 2 of runner.max_restarts=2",
    ]


def test_steps_of_each_attempt_are_yielded_and_an_error_of_the_caller_ends_none(config, store):
    ends = ([], None), ([], None)
    assert list(supervision.supervise(config, Attempts(store, *ends))) == [1]
    steps = supervision.supervise(config, attempts := Attempts(store, *ends))
    with pytest.raises(ActorError):
        for _ in steps:
            raise ActorError("of the loop's body")
    steps.close()
    assert len(attempts.seen) == 1


def test_a_damaged_checkpoint_counts_for_nothing(config, store, capsys):
    """The run resumes from an older one, and a checkpoint that is made after it is a new one."""
    dead = ActorError("rank 0 failed")

    def damage(attempt):
        def end(config):
            if len(attempts.seen) == 1:
                file = store.path(9) / "tensors"
                file.write_bytes(b"2")
            return attempt(config)

        return end

    class WithFiles(Attempts):
        def __call__(self, config):
            self.store.begin = lambda step, begin=CheckpointStore.begin: _with_file(
                begin(self.store, step)
            )
            return super().__call__(config)

    ends = [([5, 9], dead), ([6], dead), ([7], dead), ([8], dead), ([9], dead), ([], None)]
    attempts = WithFiles(store, *ends)
    supervise(config, damage(attempts))
    said = capsys.readouterr().err
    assert "resumes from the checkpoint of step 9; step 10 is repeated" in said
    assert "resumes from the checkpoint of step 6; steps 7 to 10 are repeated" in said


def _with_file(folder):
    (folder / "tensors").write_bytes(b"1")
    return folder


def test_after_the_last_restart_the_error_is_the_runs_own(config, store):
    dead = ActorError("rank 0 failed")
    attempts = Attempts(store, ([5], dead), ([], dead), ([], dead))
    with pytest.raises(ActorError):
        supervise(config, attempts)
    assert len(attempts.seen) == 3


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(config, store, tmp_path, capsys):
    def raise_error(text="Megatron rank 0 failed: ValueError: no", log="one"):
        return ActorError(f"{text}\n--- end of actor_0.log\n{log}", raised=True)

    attempts = Attempts(store, ([5], raise_error()), ([], raise_error(log="another")), ([], None))
    with pytest.raises(ActorError):
        supervise(config, attempts)
    assert len(attempts.seen) == 2
    assert "no restart: step 6 failed again with the same error" in capsys.readouterr().err
    last = json.loads((tmp_path / "decisions.jsonl").read_text().splitlines()[-1])
    assert last["choice"].startswith("no restart")
    # A step later, or another error.
    for then in (([6], raise_error()), ([], raise_error("Megatron rank 0 failed: OSError: no"))):
        supervise(config, Attempts(store, ([5], raise_error()), then, ([], None)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a reward is wrong"),
        # A weight sync without a tensor; tests/e2e/test_drill.py plants it.
        WeightsError("engine 0: the weight update left 1 tensors as they were"),
    ],
)
def test_unknown_errors_are_not_retried(config, store, error):
    attempts = Attempts(store, ([], error), ([], None))
    with pytest.raises(type(error), match=str(error)):
        supervise(config, attempts)
    assert len(attempts.seen) == 1


def test_a_run_begins_from_another_ones_checkpoint_while_it_has_none(
    config, store, tmp_path, capsys
):
    """A collapse sets all that it made aside."""
    other = CheckpointStore(tmp_path / "other", keep=1)
    other.begin(50).joinpath("tensors").write_bytes(b"1")
    path = str(other.commit(50, {}, {}))
    runner = dataclasses.replace(config.runner, resume=path, max_restarts=3)
    dead = ActorError("rank 0 failed")
    ends = ([], dead), ([55], dead), ([], RollBack(52, 54, "a")), ([], dead), ([52], dead)
    attempts = Attempts(store, *ends, ([], None))
    supervise(dataclasses.replace(config, runner=runner), attempts)
    assert [resume for resume, _ in attempts.seen] == [path, path, "auto", path, path, "auto"]
    (entry,) = json.loads((tmp_path / "rollbacks.json").read_text())
    assert entry["to"] == 50
    said = capsys.readouterr().err
    assert f"resumes from {path}; step 51 is repeated" in said
    assert "resumes from the checkpoint of step 55; step 56 is repeated" in said
    assert f"resumes from {path}; steps 51 to 56 are repeated" in said
    # The step that showed the collapse was done; none began after it.
    assert f"rollback 1, learning rate times 0.5: resumes from {path}; steps 51 to 54 are" in said
    # The run's own checkpoint, which the collapse took, is nothing to begin from.
    own = dataclasses.replace(config.runner, resume=str(store.path(52)))
    attempts = Attempts(store, ([], RollBack(52, 54, "a")), ([], None))
    supervise(dataclasses.replace(config, runner=own), attempts)
    assert [resume for resume, _ in attempts.seen] == [str(store.path(52)), "auto"]


def test_rollbacks_lower_the_rate_for_good(config, store, tmp_path):
    attempts = Attempts(
        store, ([5, 10, 15], RollBack(11, 13, "a")), ([15], RollBack(12, 14, "b")), ([], None)
    )
    supervise(config, attempts)
    lr = config.actor.optimizer.lr
    assert [rate for _, rate in attempts.seen] == [lr, lr / 2, lr / 4]
    assert store.steps() == [5, 10]
    assert (tmp_path / "checkpoints_set_aside_2" / "step_000015").is_dir()
    # The driver dies; the next start keeps the rate, and one that starts over does not.
    again = Attempts(store, ([], None), ([], None))
    auto = dataclasses.replace(config.runner, resume="auto")
    supervise(dataclasses.replace(config, runner=auto), again)
    supervise(config, again)
    assert [rate for _, rate in again.seen] == [lr / 4, lr]
