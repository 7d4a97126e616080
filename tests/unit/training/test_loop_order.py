"""In which order a step saves, wakes the engines, evaluates and is written down."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.checkpoint import CheckpointStore
from rlmath.config.load import load
from rlmath.device.residue import Residue
from rlmath.engines.requests import EngineError
from rlmath.monitor.digests import DIGESTS_FILE, DigestLog
from rlmath.rollout.journal import SampleJournal
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger
from rlmath.rollout.round import Sampled
from rlmath.rollout.weight_sync import Verification
from rlmath.training import attempt, loop, step
from rlmath.training.checkpointing import Saver
from rlmath.training.checks.base import StepChecks


class Run:
    """The parts of a run that only note what is asked of them."""

    def __init__(self, folder, sleeps):
        self.events: list[str] = []
        self.changed = self.is_paused = False
        self.made: list[Any] = []
        self.spec = SimpleNamespace(sleeps=sleeps, prefix_caching=False)
        self.weights_version, self.verified_syncs = 0, 3
        self.generation = None  # Nothing is generated.
        self.begins = False
        self.weights_before: str | None = None
        self.groups_before = 0
        self.folder = folder

    # The engines.
    def settle(self): ...

    def sleep(self):
        self.events += ["sleep"] if self.spec.sleeps else []

    def wake(self, part):
        self.events += [f"wake {part}"] if self.spec.sleeps else []

    def set_version(self, version):
        self.weights_version = version

    def metrics(self):
        return {}

    # The ranks.
    def load_checkpoint(self, folder):
        self.events.append(f"load {int(folder.name[5:11])}")

    def save_checkpoint(self, folder, in_background=False):
        self.events.append(f"write {int(folder.name[5:11])}")
        (folder / "tensors").write_bytes(bytes(10))

    def begin_room(self):
        self.events += ["begin room"] if self.spec.sleeps else []
        return [Residue(0, 0, None)] if self.spec.sleeps else []

    def make_room(self, part, meanwhile=None):
        self.events += [f"make room for {part}"] if self.spec.sleeps else []
        if meanwhile is not None:
            meanwhile()
        return [Residue(0, 0, None)] if self.spec.sleeps else []

    def take_peaks(self):
        return {}

    def send_weights(self, version):
        self.events.append(f"send {version}")

    def renew_reference(self, share, clear_optimizer):
        self.events.append(f"reference takes {share:g}")

    def save_hf(self, folder, adapters):
        self.events.append("export")


class Source:
    """Steps without a group."""

    def __init__(self, run):
        self._run = run

    def take(self, step):
        self._run.sleep()
        return Sampled(metrics={}, finished=(), shortage="", groups=(), dropped={})

    def weights_changed(self, step): ...

    def metrics(self):
        return {}

    def close(self): ...


class Monitor:
    """Only the log of steps."""

    def __init__(self, run):
        self._run = run

    @contextlib.contextmanager
    def phase(self, name):
        yield

    @contextlib.contextmanager
    def pause(self):
        self._run.is_paused = True
        yield
        self._run.is_paused = False

    def log_step(self, step, metrics):
        self._run.events.append(f"log {step}")
        return metrics | {"timing/step": 1.0}

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Runs two steps without a group, of which the second is saved, up to where a run sums up."""

    def run(sleeps, resume="auto", steps=2, evaluate=lambda step: None):
        parts = Run(tmp_path, sleeps)
        store = CheckpointStore(tmp_path / "checkpoints", keep=1)
        monitor = Monitor(parts)
        rewards = SimpleNamespace(set_step=lambda *_: None, metrics=dict)
        config = load(
            [
                *("experiment=quickstart", "model.path=m", "reward.items=[]"),
                *(f"runner.run_dir={tmp_path}", f"runner.resume={resume}"),
                *(f"runner.steps={steps}", "runner.save_every=2", "runner.grace_s=0"),
                *("runner.journal_keep_gib=0", "runner.replay_keep_gib=0", "watchdog.stall_s=0"),
                *("runner.check_export_sequences=0", f"eval.every={1 if steps > 2 else 2}"),
                *("algorithm.minibatches_per_step=1", "algorithm.prompts_per_step=0"),
                *("algorithm.kl_coef=0.1", "algorithm.reference.kind=reset"),
                *("algorithm.reference.every=2", "data.shuffle=false", "data.train_paths=[]"),
            ]
        )
        run = SimpleNamespace(
            config=config,
            layout=None,
            actor=parts,
            sampling=SimpleNamespace(pool=parts, rewards=rewards, collector=None),
            teacher=None,
        )
        saver = Saver(store, parts, {})

        def no_evaluation(_, __, ___, ____, step):
            parts.events.append("evaluate")
            evaluate(step)
            return {}

        def open_monitor(folder, *given, **_):
            parts.weights_before = DigestLog(folder, given[-1]).weights_after(given[-1] or 0)
            return contextlib.nullcontext(monitor)

        def record(_, done, begins, given):
            parts.begins = begins
            parts.events.append(f"record {done}")

        def sampler(*given):
            parts.groups_before = given[3].balance.admitted
            return SimpleNamespace(journal=SampleJournal())

        replaced = {
            "load_tokenizer": lambda _: None,
            "rehearse_export": lambda _: None,
            "open_problems": lambda *_: (None, []),
            "load_held_out": lambda *_: [SimpleNamespace(problems=())],
            "Coefficients": lambda _: SimpleNamespace(kl_coef=0.0),
            "open_store": lambda _: store,
            "attempts": SimpleNamespace(
                record=record,
                flat_settings=lambda _: {},
                note_export=lambda _, step: parts.events.append(f"exported {step}"),
            ),
            "to_yaml": lambda _: "",
            "open_training": lambda *_, **__: contextlib.nullcontext(run),
            "watchdog_probes": lambda *_: [],
            "verification_of": lambda *_: Verification(0),
            "step_checks": lambda: StepChecks([]),
            "open_monitor": open_monitor,
            "least_groups": lambda *_: 1,
            "Sampler": sampler,
            "check_resumed_groups": lambda *_: None,
            "check_resumed_model": lambda *_: None,
            "GroupSource": lambda *_: Source(parts),
            "open_saver": lambda *_: contextlib.closing(saver),
            "read_metrics": lambda _: [],
            "CollapseDetectors": lambda *_: SimpleNamespace(update=lambda *_: []),
            "watch_progress": lambda *_: contextlib.nullcontext(),
            "act": lambda *_: None,
            "evaluate": no_evaluation,
            "check_export": lambda *_: {},
            "summarize": lambda *_: None,
            "ending": lambda *_: "",
            "write_card": lambda _: None,
        }
        for name, value in replaced.items():
            for module in (loop, attempt):
                monkeypatch.setattr(module, name, value, raising=False)
        monkeypatch.setattr(step, "plan_step", lambda *_: None)
        parts.made = list(loop.train(config))
        assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
        return parts

    return run


def sync(version):
    """The ranks give up memory before the engines take it, for weights and for the cache; what they
    still copy for the former was begun before."""
    return [
        *("begin room", "make room for weights", "wake weights", f"send {version}"),
        *("make room for kv_cache", "wake kv_cache"),
    ]


def test_ranks_write_while_colocated_engines_sleep(run_of):
    """The checkpoint still has the evaluation: it is one only after that."""
    assert run_of(sleeps=True).events == [
        *("evaluate", "log 0", "record 0"),
        *("sleep", *sync(1), "log 1"),
        # Skipped steps are counted for it too.
        *("sleep", "reference takes 1", "write 2", *sync(2), "evaluate", "log 2"),
        *("sleep", "export", "exported 2"),
    ]


def test_ranks_write_after_the_step_where_engines_have_their_own_memory(run_of):
    assert run_of(sleeps=False).events == [
        *("evaluate", "log 0", "record 0", "send 1", "log 1"),
        *("reference takes 1", "send 2", "evaluate", "log 2", "write 2", "export", "exported 2"),
    ]


def test_the_loop_yields_each_step_with_its_line_and_answers_between(run_of):
    parts = run_of(sleeps=False)
    opened, one, two, finished = parts.made
    assert isinstance(opened, loop.Opened) and isinstance(finished, loop.Finished)
    assert [(one.number, one.groups), (two.number, two.groups)] == [(1, ()), (2, ())]
    assert one.metrics["timing/step"] == 1.0
    events = loop.answer_between(opened.training, two)
    assert next(events) is two and parts.is_paused
    assert events.send(lambda training: (training, parts.is_paused)) == loop.Answer(
        (opened.training, False)
    )
    assert parts.is_paused
    with pytest.raises(StopIteration):
        next(events)


@pytest.mark.parametrize(
    "start", ["never", "other/checkpoints", "checkpoints_set_aside_1", "checkpoints"]
)
def test_a_run_that_begins_has_nothing_of_the_folders_earlier_run(run_of, tmp_path, start):
    """Results of the earlier run's step 1 are of other weights, whatever has its number."""
    files = ("metrics.jsonl", DIGESTS_FILE, LEDGER_FILE)
    (tmp_path / files[0]).write_text('{"step": 1, "rollout/rewards": 0.5}\n')
    (tmp_path / files[1]).write_text('{"step": 1, "weights": "theirs"}\n')
    Ledger(tmp_path / LEDGER_FILE).write(1, [{"event": Event.admitted, "group": 0}])
    if start != "never":
        store = CheckpointStore(tmp_path / start, keep=1)
        store.begin(1).joinpath("tensors").write_bytes(b"1")
        start = str(store.commit(1, {"weights_version": 1, "sampler": {}}, {}))
    run = run_of(sleeps=False, resume=start)
    own = start == str(tmp_path / "checkpoints" / "step_000001")
    assert run.weights_before == ("theirs" if own else None)
    assert (run.groups_before, run.begins) == (int(own), not own)
    folder = tmp_path if own else tmp_path / "set_aside_1"
    assert all((folder / name).read_text() for name in files)
    assert own or not any((tmp_path / name).is_file() for name in (files[0], files[2]))


def test_a_rewards_parameters_are_checked_before_anything_starts(monkeypatch, tmp_path):
    """Neither Ray nor an engine is up when a reward turns out to want what the data has not."""
    from rlmath.config.arithmetic import RunLayout
    from rlmath.config.schema import Device, Placement
    from rlmath.model.parallel import Layout
    from rlmath.rewards import RewardMix, RewardSettingError
    from rlmath.training import opening
    from rlmath.types import Problem

    rewards = tmp_path / "rewards.py"
    rewards.write_text("def f(completions, answer, **kwargs):\n    return [0.0 for _ in answer]\n")

    def not_reached(*_, **__):
        raise AssertionError("started")

    replaced = {
        "with_model_folder": lambda config: config,
        "choose_platform": lambda *_, **__: SimpleNamespace(
            name="cpu", prepare_driver=lambda: None
        ),
        "resolve_layout": lambda *_: RunLayout(Device.cpu, Layout(), 1, 1, 0, Placement.colocated),
        "reward_mix": lambda _: RewardMix.from_config([f"{rewards}:f"]),
        "ray_session": not_reached,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(opening, name, value)
    config = SimpleNamespace(
        cluster=SimpleNamespace(device=SimpleNamespace(value="cpu"), ray_address=None),
        runner=SimpleNamespace(run_dir=str(tmp_path)),
        rollout=SimpleNamespace(tools=[], environment=None),
    )

    def start(**fields):
        problems = [Problem("rows:1", "?", (1,), ("4",), columns=fields)]
        with opening.open_engines(config, problems):
            pass

    with pytest.raises(RewardSettingError, match=r"rewards.py:1\): .* answer in rows:1"):
        start(solution="4")
    with pytest.raises(AssertionError, match="started"):
        start(answer="4")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, EngineError("lost")])
def test_a_signal_in_an_evaluation_costs_no_update(run_of, tmp_path, error):
    """Its step is done: it is logged and saved, though an evaluation may take longer than it."""

    def evaluate(step):
        if step == 3:
            raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_of(sleeps=False, steps=5, evaluate=evaluate)
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_the_last_step_is_done_again_for_its_evaluation(run_of, tmp_path):
    def evaluate(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_of(sleeps=False, steps=5, evaluate=evaluate)
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


def test_an_export_after_fewer_steps_were_asked_for_is_of_those_that_were_made(run_of, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.begin(2).joinpath("tensors").write_bytes(b"1")
    store.commit(2, {"weights_version": 2, "sampler": {}}, {})
    assert run_of(sleeps=False, steps=1).events[-1] == "exported 2"
