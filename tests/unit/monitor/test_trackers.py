"""Trackers are told what a run reports, each through its client; none stops or holds up a run."""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlmath.checks.trackers import tracker_problems
from rlmath.config.load import load
from rlmath.config.schema import RunnerConfig
from rlmath.monitor import MetricsWriter, open_monitor, read_metrics
from rlmath.monitor.trackers import TRACKERS, fan_out
from rlmath.monitor.trackers.weights_and_biases import has_key
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401


class Client:
    """Notes every call of a client; its own methods stand in for what rlmath reads of it."""

    def __init__(self):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **named):
            self.calls.append((name, arguments, named))
            return self.answer(name, named)

        return call

    def answer(self, name, named):
        return None

    def keywords_of(self, name):
        return [named for called, _, named in self.calls if called == name]

    def arguments_of(self, name):
        return [arguments for called, arguments, _ in self.calls if called == name]


class Wandb(Client):
    def __init__(self):
        super().__init__()
        self.run = Client()
        self.run.config = Client()

    def answer(self, name, named):
        return self.run if name == "init" else None


class Mlflow(Client):
    def answer(self, name, named):
        if name == "MlflowClient":
            return self
        if name == "create_run":
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
        if name == "get_run":
            return SimpleNamespace(data=SimpleNamespace(params={"known": "1"}))
        return "7" if name == "create_experiment" else None


class TrackioClient(Client):
    def __init__(self):
        super().__init__()
        self.run = Client()
        self.run.name = "mine"

    def answer(self, name, named):
        return self.run


def install(monkeypatch, name, client):
    monkeypatch.setitem(sys.modules, name, client)
    return client


def write(folder, name, last_step=None):
    """Settings and two steps; what was warned of."""
    said = []
    with MetricsWriter(folder, last_step, [name], "mine", "project", said.append) as writer:
        writer.write_settings("a: 1", {"runner.seed": 3, "known": 1}, ["x"])
        for step in (4, 5):
            writer.write(step, {"x": 0.5 * step, "odd": math.nan}, {"text": "t"})
    return said


def test_wandb(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    client = install(monkeypatch, "wandb", Wandb())
    assert write(tmp_path, "wandb") == []
    (begun,) = client.keywords_of("init")
    assert begun["mode"] is None and begun["name"] == "mine" and begun["project"] == "project"
    assert [one[0]["x"] for one in client.run.arguments_of("log")] == [2.0, 2.5]
    assert [one[0]["step"] for one in client.run.arguments_of("log")] == [4, 5]
    assert client.run.config.arguments_of("update") == [({"runner.seed": 3, "known": 1},)]
    assert client.run.keywords_of("finish") == [{}]
    # A run that resumes is the same one; one that starts over is another.
    write(tmp_path, "wandb", last_step=3)
    write(tmp_path, "wandb")
    first, resumed, over = (one["id"] for one in client.keywords_of("init"))
    assert first == resumed != over


def test_wandb_without_a_key_is_offline(monkeypatch, tmp_path):
    """Its client would ask for one at the terminal."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    client = install(monkeypatch, "wandb", Wandb())
    assert not has_key()
    write(tmp_path / "run", "wandb")
    assert client.keywords_of("init")[0]["mode"] == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()


def test_mlflow(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = install(monkeypatch, "mlflow", Mlflow())
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda *values: values
    entities.Param = lambda *values: values
    install(monkeypatch, "mlflow.entities", entities)
    assert write(tmp_path, "mlflow") == []
    assert client.keywords_of("MlflowClient") == [
        {"tracking_uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    ]
    parameters, *metrics = client.keywords_of("log_batch")
    assert parameters["params"] == [("runner.seed", "3")]
    assert [one["metrics"][0][:2] + one["metrics"][0][3:] for one in metrics] == [
        ("x", 2.0, 4),
        ("x", 2.5, 5),
    ]
    assert all(len(one["metrics"]) == 1 for one in metrics)  # NaN is left out.
    write(tmp_path, "mlflow", last_step=3)
    assert len(client.keywords_of("create_run")) == 1 and client.arguments_of("update_run") == [
        ("r1",)
    ]


def test_trackio(monkeypatch, tmp_path):
    client = install(monkeypatch, "trackio", TrackioClient())
    assert write(tmp_path, "trackio") == []
    assert client.keywords_of("init")[0]["config"] == {"runner.seed": 3, "known": 1}
    assert client.run.arguments_of("log") == [({"x": 2.0},), ({"x": 2.5},)]
    assert client.run.keywords_of("log") == [{"step": 4}, {"step": 5}]
    write(tmp_path, "trackio", last_step=3)
    assert [one["resume"] for one in client.keywords_of("init")] == ["never", "allow"]


class SwanLabRun(Client):
    """With the signatures of swanlab 0.10.3."""

    def __init__(self):
        super().__init__()
        self.config = Client()

    def log(self, data, step=None):
        self.calls.append(("log", (data, step), {}))

    def finish(self, state="success", error=None, async_log_timeout=None):
        self.calls.append(("finish", (state,), {}))


class SwanLabClient(Client):
    def __init__(self):
        super().__init__()
        self.run = SwanLabRun()

    def init(self, *, project, name, id, log_dir, mode, resume):
        assert mode in (None, "disabled", "online", "local", "offline")
        assert resume in ("must", "allow", "never")
        self.calls.append(("init", (), {"id": id, "mode": mode, "log_dir": log_dir, "name": name}))
        return self.run


def test_swanlab(monkeypatch, tmp_path):
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "login"))
    monkeypatch.chdir(tmp_path)
    client = install(monkeypatch, "swanlab", SwanLabClient())
    assert write(tmp_path / "run", "swanlab") == []
    (begun,) = client.keywords_of("init")
    # Without a key it would ask at the terminal.
    assert begun["mode"] == "offline" and begun["log_dir"] == str(tmp_path / "run" / "swanlog")
    assert client.run.arguments_of("log") == [({"x": 2.0}, 4), ({"x": 2.5}, 5)]  # NaN is left out.
    assert client.run.config.arguments_of("update") == [({"runner.seed": 3, "known": 1},)]
    assert client.run.arguments_of("finish") == [("success",)]
    monkeypatch.setenv("SWANLAB_API_KEY", "secret")
    write(tmp_path / "run", "swanlab", last_step=3)
    write(tmp_path / "run", "swanlab")
    first, resumed, over = client.keywords_of("init")
    assert resumed["mode"] is None and first["id"] == resumed["id"] != over["id"]


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_client_that_fails_warns_once(method, monkeypatch, tmp_path):
    class Broken(Wandb):
        def __init__(self):
            super().__init__()
            if method != "init":
                setattr(self.run, method, self.fail)

        def answer(self, name, named):
            return self.fail() if name == method else super().answer(name, named)

        def fail(self, *_, **__):
            raise SystemExit("no network")

    install(monkeypatch, "wandb", Broken())
    (said,) = write(tmp_path, "wandb")
    assert "runner.trackers: wandb failed" in said and "SystemExit: no network" in said
    assert [line["step"] for line in read_metrics(tmp_path)] == [4, 5]


@pytest.mark.parametrize(
    ("most_waiting", "text"), [(99, "was not done"), (2, "2 steps wait for it")]
)
def test_a_client_that_hangs_does_not_hold_up_the_run(monkeypatch, tmp_path, most_waiting, text):
    answered = threading.Event()

    class Hanging(Wandb):
        def answer(self, name, named):
            answered.wait(20)
            return super().answer(name, named)

    monkeypatch.setattr(fan_out, "_MOST_WAITING", most_waiting)
    monkeypatch.setattr(fan_out, "CLOSE_S", 0.1)
    install(monkeypatch, "wandb", Hanging())
    try:
        began_s = time.monotonic()
        (said,) = write(tmp_path, "wandb")
        assert time.monotonic() - began_s < 15
        assert text in said
    finally:
        answered.set()


def test_tensorboard_that_cannot_write_stops_no_run(tmp_path):
    (tmp_path / "tensorboard").write_text("not a folder")
    (said,) = write(tmp_path, "tensorboard")
    assert "tensorboard failed" in said
    assert len(read_metrics(tmp_path)) == 2


def test_the_settings_choose_the_trackers_and_name_the_run(monkeypatch, tmp_path):
    client = install(monkeypatch, "trackio", TrackioClient())
    run = tmp_path / "mine"
    runner = RunnerConfig(run_dir=str(run), trackers=["trackio"], tracker_project="math")
    for folder in (run, run / "sft_log"):
        with open_monitor(folder, runner, total_steps=1) as monitor:
            monitor.log_step(1, {"x": 1.0})
    assert [one["name"] for one in client.keywords_of("init")] == ["mine", "mine/sft_log"]
    assert {one["project"] for one in client.keywords_of("init")} == {"math"}
    assert not (run / "tensorboard").exists()


def test_a_tracker_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load(["experiment=quickstart", "runner.trackers=[tensorboard,wandb,mlfow]"])
    missing, unknown = tracker_problems(config)
    assert "pip install wandb" in missing and "did you mean mlflow?" in unknown


def test_a_tracker_of_a_file_gets_all_steps_in_its_own_thread(
    tmp_path,
    own_plugins,  # noqa: F811
):
    file = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "tracker.py"
    name = f"{file}:CsvTracker"
    try:
        config = load(["experiment=quickstart", f"runner.trackers=['{name}']"])
        assert list(tracker_problems(config)) == []
        assert write(tmp_path, name) == []
        written = (tmp_path / "metrics.csv").read_text().splitlines()
        assert written[0].split(",") == ["step", "metric", "value"]
        assert [line for line in written if ",x," in line] == ["4,x,2.0", "5,x,2.5"]
        # The file's problem, and no tracker's.
        (problem,) = tracker_problems(
            load(["experiment=quickstart", f"runner.trackers=['{file}:csv']"])
        )
        assert "csv is not registered for runner.trackers" in problem
    finally:
        TRACKERS.remove("csv")
