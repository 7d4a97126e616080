"""``rlmath doctor`` on this machine, and on machines that lack something."""

import importlib.metadata
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmath.cli import main
from rlmath.commands import doctor
from rlmath.utils import infiniband

pytestmark = pytest.mark.process


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def test_doctor_passes_on_this_machine(capsys):
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert "torch" in out
    assert "shared memory" in out
    assert "ports" in out
    assert code == (2 if "\nbad " in f"\n{out}" else 0)


def test_settings_are_checked_as_at_a_run(tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "1+1", "solutions": ["2"]}\n')
    overrides = ["experiment=quickstart", "model=tiny", "model.path=tiny", "cluster.device=cpu"]
    overrides += [f"data.train_paths=[{file}]", "data.eval_paths=[]", f"runner.run_dir={tmp_path}"]
    assert main(["doctor", *overrides]) == 2
    out = capsys.readouterr().out
    assert "data.prompt_key=prompt" in out
    assert "1 bad" in out
    main(["doctor", *overrides, "data.prompt_key=question"])
    assert "model, data, layout and sizes fit" in capsys.readouterr().out


def test_a_wrong_version_and_a_missing_package(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "sympy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "hydra-core" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = levels(doctor.packages())
    assert found["hydra-core"] == found["sympy"] == "bad"


def test_little_shared_memory(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**26, 0, 2**26))
    (finding,) = doctor.shared_memory()
    assert finding.level == "bad"
    assert "--shm-size" in finding.text
    assert levels(doctor.disk(Path(".")))["disk"] == "note"


def test_rdma_adapter_without_library_device_and_locked_memory_is_named(tmp_path, monkeypatch):
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "class" / "infiniband" / "mlx5_1" / "ports" / "1").mkdir(parents=True)
    assert infiniband.adapters(tmp_path) == ["mlx5_0"]
    monkeypatch.setattr(infiniband.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(infiniband, "locks_without_limit", lambda: False)
    missing = list(infiniband.problems(tmp_path, "libnone.so.1"))
    assert [any(word in one for one in missing) for word in ("libnone", "uverbs", "8 MiB")] == [
        True
    ] * 3
    # With each of them there, nothing is left to say.
    (tmp_path / "infiniband").mkdir()
    (tmp_path / "infiniband" / "uverbs0").touch()
    monkeypatch.setattr(infiniband, "locks_without_limit", lambda: True)
    assert list(infiniband.problems(tmp_path, "libc.so.6")) == []


@pytest.mark.parametrize(
    ("adapters", "problems", "level", "text"),
    [
        ([], ["x"], "ok", "no adapter"),
        (["mlx5_0"], ["no library"], "note", "no library"),
        (["mlx5_0"], [], "ok", "mlx5_0"),
    ],
)
def test_rdma_finding_on_a_gpu_machine(adapters, problems, level, text, monkeypatch):
    assert list(doctor.rdma()) == []  # On this machine without GPUs.
    monkeypatch.setattr(doctor.Machine, "here", lambda: SimpleNamespace(gpus=8))
    monkeypatch.setattr(infiniband, "adapters", lambda: adapters)
    monkeypatch.setattr(infiniband, "problems", lambda: iter(problems))
    (finding,) = doctor.rdma()
    assert finding.level == level and text in finding.text
