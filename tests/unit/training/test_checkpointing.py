import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from rlmath.actor.rank_calls import ActorError
from rlmath.checkpoint import CheckpointStore, DiskFull
from rlmath.cluster.watchdog import Stalled, watch_progress
from rlmath.config.schema import Device
from rlmath.errors import UpdateStopped, UserError
from rlmath.monitor.collapse import RollBack
from rlmath.rewards.base import RewardError
from rlmath.training.checkpointing import Saver, open_saver
from rlmath.training.gate import AlignmentError
from rlmath.training.grace import Grace
from rlmath.utils.ending_signals import signals_wait
from rlmath.weights.model_folder import replacing_folder


class SlowRanks:
    """Ranks whose disk takes a few blocks, and then no more."""

    def __init__(self, blocks, every_s, then_hangs_s=0.0):
        self.blocks, self.every_s, self.then_hangs_s = blocks, every_s, then_hangs_s
        self.changed = False

    def save_checkpoint(self, folder, in_background=False):
        with (folder / "tensors").open("wb") as file:
            for _ in range(self.blocks):
                time.sleep(self.every_s)
                file.write(bytes(2**20))
                file.flush()
        time.sleep(self.then_hangs_s)


def saver_of(ranks, folder):
    saver = Saver(CheckpointStore(folder, keep=1), ranks, {})
    saver.step_done(1, {})
    return saver


def test_a_slow_disk_is_no_stall_as_long_as_the_checkpoint_grows(tmp_path):
    saver = saver_of(SlowRanks(blocks=12, every_s=0.1), tmp_path / "slow")
    with watch_progress(0.8, [saver.watchdog_probe()]):
        saver.save()
    assert (tmp_path / "slow" / "step_000001" / "tensors").stat().st_size == 12 * 2**20


def test_an_export_that_grows_is_no_stall(tmp_path):
    probe = saver_of(SlowRanks(blocks=0, every_s=0.0), tmp_path / "checkpoints").watchdog_probe()
    with replacing_folder(tmp_path / "hf") as partial:
        before = probe.progress()
        (partial / "model.safetensors").write_bytes(bytes(2**20))
        assert probe.progress() != before
        assert "1.0 MiB so far" in "".join(probe.waiting_on())


def test_a_disk_that_stands_still_is_one(tmp_path):
    saver = saver_of(SlowRanks(blocks=2, every_s=0.05, then_hangs_s=30.0), tmp_path / "stands")
    said = pytest.raises(Stalled, match=r"step_000001\.partial, 2\.0 MiB so far")
    with said, watch_progress(1.0, [saver.watchdog_probe()]):
        saver.save()
    assert not list((tmp_path / "stands").iterdir())


@pytest.mark.parametrize(
    "cause",
    [
        *(RewardError("a reward raises"), SystemExit(143)),
        *(OSError(5, "Input/output error"), ZeroDivisionError(), MemoryError()),
    ],
)
def test_steps_that_are_done_are_saved_when_a_run_is_cut_short(tmp_path, cause, capsys):
    saver = saver_of(SlowRanks(blocks=1, every_s=0.0), tmp_path)
    with pytest.raises(type(cause)), saver.saving_when_cut_short():
        raise cause
    assert (tmp_path / "step_000001" / "manifest.json").is_file()
    assert "; saved after step 1: runner.resume=auto resumes there" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cause",
    [
        *(ActorError("a rank died"), Stalled("a rank hangs"), RollBack(1, 2, "collapse")),
        *(AlignmentError("weights differ"), DiskFull("no room"), RayActorError()),
    ],
)
def test_weights_that_may_be_wrong_are_not_saved(tmp_path, cause):
    saver = saver_of(SlowRanks(blocks=1, every_s=0.0), tmp_path)
    with pytest.raises(type(cause)), saver.saving_when_cut_short():
        raise cause
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cause", "folder"),
    [
        (DiskFull("The disk ran full while F was written."), "F"),
        (OSError(28, "No space left on device"), "RUN"),
        (OSError(122, "Disk quota exceeded", "/other/samples/step_2.jsonl"), "/other/samples"),
    ],
)
def test_a_full_disk_names_the_folder_and_the_step(tmp_path, cause, folder):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    saver = saver_of(ranks, tmp_path / "checkpoints")
    saver.save()
    ranks.changed = True
    with pytest.raises(DiskFull) as error, saver.saving_when_cut_short():
        raise cause
    folder = folder.replace("RUN", str(tmp_path))
    assert f"while {folder} was written" in str(error.value)
    assert "runner.resume=auto resumes after step 1" in str(error.value)


def test_engines_leave_the_gpus_to_ranks_that_save_after_all(tmp_path):
    events = []
    ranks = SlowRanks(blocks=1, every_s=0.0)
    store = CheckpointStore(tmp_path, keep=1)
    saver = Saver(store, ranks, {}, leave_gpus=lambda: events.append("left"))
    saver.step_done(1, {})
    saver.save()
    assert not events, "in the loop engines sleep, or have their own memory"
    saver.step_done(2, {})
    with pytest.raises(RewardError), saver.saving_when_cut_short():
        raise RewardError("a reward raises")
    assert events == ["left"]


def test_unfinished_update_is_not_saved(tmp_path, capsys):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    saver = saver_of(ranks, tmp_path)
    ranks.changed = True
    with pytest.raises(RewardError), saver.saving_when_cut_short():
        raise RewardError("a reward raises")
    assert not list(tmp_path.iterdir())
    assert "stopped by RewardError in the update of step 2" in capsys.readouterr().out


def test_a_run_that_began_from_another_ones_checkpoint_is_saved_in_its_own_folder(tmp_path, capsys):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    other = saver_of(ranks, tmp_path / "other")
    other.step_done(50, {"rollout/rewards": 0.5})
    other.save()
    store = CheckpointStore(tmp_path / "own", keep=1)
    theirs = store.resume(str(tmp_path / "other" / "step_000050"))

    def cut_short():
        saver = Saver(store, ranks, {})
        found = store.resume("auto")
        saver.restore(found or theirs, None)
        assert saver.committed_step == (50 if found else 0)
        with pytest.raises(RewardError), saver.saving_when_cut_short():
            raise RewardError("a reward raises")
        return capsys.readouterr().out

    ranks.load_checkpoint = lambda _: None
    saver = Saver(store, ranks, {})
    saver.restore(theirs, None)
    ranks.changed = True
    with pytest.raises(RewardError), saver.saving_when_cut_short():
        raise RewardError("a reward raises")
    assert f"runner.resume={theirs.path} starts from there again" in capsys.readouterr().out
    assert store.steps() == []
    assert "saved after step 50" in cut_short()
    found = store.resume("auto")
    assert found is not None and (found.step, found.metrics) == (50, theirs.metrics)
    written = found.path.stat().st_ino
    assert "saved after step 50" in cut_short()
    assert found.path.stat().st_ino == written, "it is saved already"


def test_a_checkpoint_without_the_metric_of_the_best_is_named(tmp_path, capsys):
    store = CheckpointStore(tmp_path, keep=1, best={"rollout/reward": "max"})
    saver = Saver(store, SlowRanks(blocks=1, every_s=0.0), {})
    saver.step_done(1, {"rollout/rewards": 0.5})
    saver.save()
    assert "step 1 has no such metric" in (said := capsys.readouterr().err)
    assert "did you mean rollout/rewards?" in said
    saver.step_done(2, {"rollout/reward": 0.5})
    saver.save()
    assert not capsys.readouterr().err


def test_early_checkpoint_is_committed_when_the_step_is_done(tmp_path):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    saver = saver_of(ranks, tmp_path)
    saver.write(2)
    assert [one.name for one in tmp_path.iterdir()] == ["step_000002.partial"]
    saver.step_done(2, {"eval/accuracy": 0.5})
    saver.save()
    found = CheckpointStore(tmp_path, keep=1).resume("auto")
    assert found is not None and found.step == 2
    assert found.metrics == {"eval/accuracy": 0.5}
    assert (found.path / "tensors").stat().st_size == 2**20, "written once"
    # One that was not written early is written by the save.
    saver.step_done(3, {})
    saver.save()
    assert (tmp_path / "step_000003" / "tensors").is_file()


def test_early_checkpoint_of_an_unfinished_step_is_discarded(tmp_path):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    saver = saver_of(ranks, tmp_path)
    saver.save()
    ranks.changed = True
    with pytest.raises(RewardError), saver.saving_when_cut_short():
        saver.write(2)
        raise RewardError("evaluation fails")
    saver.close()
    assert [one.name for one in tmp_path.iterdir()] == ["step_000001"]


class SignalledRanks(SlowRanks):
    """Ranks in whose first save the driver is told to end, that many times."""

    def __init__(self, number, signals):
        super().__init__(blocks=1, every_s=0.0)
        self.number, self.signals, self.saves = number, signals, 0

    def save_checkpoint(self, folder, in_background=False):
        self.saves += 1
        for _ in range(self.signals if self.saves == 1 else 0):
            os.kill(os.getpid(), self.number)
            time.sleep(0.01)
        super().save_checkpoint(folder)


@pytest.fixture
def ends_the_process():
    """On SIGTERM, as the run's own handler does."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_in_a_save_does_not_begin_it_again(
    tmp_path, number, signals, ends_the_process, capsys
):
    """One is noted until the checkpoint is there; a second one gives the save up."""
    ranks = SignalledRanks(number, signals)
    saver = saver_of(ranks, tmp_path)
    with pytest.raises((SystemExit, KeyboardInterrupt)), saver.saving_when_cut_short():
        with Grace(60, lambda: ranks.changed), signals_wait("a save"):
            saver.save()
        pytest.fail("it continued")
    assert ranks.saves == 1
    assert (tmp_path / "step_000001" / "manifest.json").is_file() == (signals == 1)
    said = capsys.readouterr().out
    assert f"{signal.Signals(number).name} during a save" in said
    after = "saved after step 1" if signals == 1 else "there is no checkpoint yet"
    assert after in said


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        (None, Device.cuda, True),
        (None, Device.cpu, False),
        (False, Device.cuda, False),
        (True, Device.cpu, True),
    ],
)
def test_checkpoints_are_written_in_the_background_on_cuda_unless_a_setting_says_otherwise(
    tmp_path, setting, device, expected
):
    runner = SimpleNamespace(background_checkpoints=setting)
    store = CheckpointStore(tmp_path, keep=1)
    config = SimpleNamespace(runner=runner)
    run = SimpleNamespace(config=config, actor=None, layout=SimpleNamespace(device=device))
    with open_saver(store, run, {}) as saver:
        assert saver._in_background is expected


class BackgroundRanks(SlowRanks):
    """Ranks that are still writing, or fail, whenever somebody looks."""

    def __init__(self, looks):
        super().__init__(blocks=1, every_s=0.0)
        self.looks, self.waits = iter(looks), []

    def checkpoint_written(self, wait=False):
        self.waits.append(wait)
        found = next(self.looks)
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.mark.parametrize(
    ("looks", "waits", "is_kept"),
    [
        ([False, True], [False, True], True),
        # A signal in a look: the run's end waits for the files.
        ([KeyboardInterrupt(), True], [False, True], True),
        # One while it waits gives them up, as does a disk that is full.
        ([KeyboardInterrupt()], [True], False),
        ([DiskFull("full")], [False], False),
    ],
)
def test_files_written_in_the_background_become_a_checkpoint_once(
    tmp_path, looks, waits, is_kept, capsys
):
    ranks = BackgroundRanks(looks)
    saver = Saver(CheckpointStore(tmp_path, keep=1), ranks, {}, in_background=True)
    saver.step_done(1, {})
    saver.save()
    with pytest.raises((KeyboardInterrupt, UserError)), saver.saving_when_cut_short():
        saver.poll(wait=waits[0])
        raise KeyboardInterrupt
    assert ranks.waits == waits
    assert [one.name for one in tmp_path.iterdir()] == ["step_000001"] * is_kept
    assert ("saved after step 1" in capsys.readouterr().out) == is_kept


def test_an_update_that_was_stopped_loses_no_step(tmp_path, ends_the_process, capsys):
    ranks = SlowRanks(blocks=1, every_s=0.0)
    saver = saver_of(ranks, tmp_path)
    ranks.changed = True
    asked = []
    grace = Grace(60, lambda: ranks.changed, lambda: asked.append(True))
    with pytest.raises(SystemExit) as ended, saver.saving_when_cut_short(), grace:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert asked
        ranks.changed = False
        raise UpdateStopped
    assert ended.value.code == 143
    assert "interrupted; saved after step 1" in capsys.readouterr().out
