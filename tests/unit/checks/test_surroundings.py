"""Environment of a run at its start: file systems, temporary folders, servers, the hub, scripts."""

import dataclasses
import json
import socket
import stat
from pathlib import Path

import pytest
from ray._private.utils import validate_socket_filepath

from rlmath.checkpoint import CheckpointStore
from rlmath.checkpoint.mirror import mirroring
from rlmath.checks import machine, network
from rlmath.checks.pairs import pair_problems
from rlmath.checks.profile import profile_problems
from rlmath.checks.run import find_problems, names
from rlmath.cli import main
from rlmath.commands import doctor
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.model import hub
from tests.support.remote_store import faulty_store
from tests.unit.checks.config_cases import GPU_MACHINE


@pytest.fixture
def check(tmp_path, capsys):
    """Exit code and output of ``rlmath train ... --check`` with a tiny model."""
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}) + "\n")
    base = ["cluster.device=cpu", "model=tiny", "model.path=tiny", f"data.train_paths=[{data}]"]
    base.append("rollout.max_response_tokens=64")

    def run(*settings):
        code = main(["train", *base, f"runner.run_dir={tmp_path}/run", *settings, "--check"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def closed_port():
    """A port at which nobody listens, held so that nobody else takes it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def open_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("folder", ["/proc/run", "/sys/run"])
def test_a_run_dir_where_no_file_can_be_made_is_refused(check, folder):
    """Permissions say nothing of such a file system to root."""
    code, text = check(f"runner.run_dir={folder}")
    assert code == 2
    assert f"runner.run_dir={folder}: " in text and "give another folder" in text
    assert [f.level for f in doctor.disk(Path(folder))] == ["bad"]


def test_a_full_disk_is_refused(check, monkeypatch, tmp_path):
    def full(dir):
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
    code, text = check()
    assert code == 2
    assert f"{tmp_path} cannot be written (No space left on device)" in text


def test_a_run_dir_that_is_a_link_to_nothing_is_refused(check, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    code, text = check(f"runner.run_dir={tmp_path}/link")
    assert code == 2 and "is a link to nothing" in text


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_folder_without_room_for_a_sockets_path_is_refused(
    check, monkeypatch, tmp_path, name
):
    monkeypatch.setenv(name, str(tmp_path / "missing"))
    code, text = check()
    assert code == 2 and f"{name}={tmp_path}/missing: no such folder" in text
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv(name, str(long))
    code, text = check()
    assert code == 2 and "more than the 107" in text and "RAY_TMPDIR=/tmp" in text
    assert [f.level for f in doctor.temporary_files()] == ["bad"]
    # Ray makes its sockets elsewhere, or a cluster that is running has them already.
    assert check("cluster.ray_address=auto")[0] == 0
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert check()[0] == 0 and not list(doctor.temporary_files())


def test_the_longest_temporary_folder_is_the_longest_that_ray_takes(monkeypatch):
    monkeypatch.setattr(machine, "unwritable", lambda _: None)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)

    def fits(length):
        monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * (length - 1))
        return machine.ray_folder_problem() is None

    longest = max(length for length in range(1, 107) if fits(length))
    digits = len(str(int(Path("/proc/sys/kernel/pid_max").read_text()) - 1))
    session = f"session_2026-01-31_23-59-59_123456_{'9' * digits}"
    path = f"/ray/{session}/sockets/plasma_store"
    validate_socket_filepath("x" * longest + path)
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath("x" * (longest + 1) + path)


def test_reward_servers_that_do_not_answer_are_refused(check, closed_port, open_port):
    url, other = (f"http://127.0.0.1:{port}/reward" for port in (closed_port, open_port))
    code, text = check(f"reward.items=[{{name: '{url}'}}]")
    assert code == 2
    assert f"no answer from 127.0.0.1:{closed_port} (Connection refused)" in text
    code, text = check(f"reward.items=[{{name: remote, params: {{urls: ['{url}']}}}}]")
    assert code == 2 and "reward.items[0].params.urls: no answer" in text
    code, text = check(f"reward.items=[{{name: '{url},{other}'}}]")
    assert code == 0 and "\nwarning  reward.items[0].name" in text
    # Such a server may run beside the run, on a machine that this one is not.
    config = load(["model.path=m", "runner.run_dir=r", f"reward.items=[{{name: '{url}'}}]"])
    answers = network.ask(config, "train", elsewhere=True, ask_hub=False)
    assert not answers.problems and "from this machine" in answers.warnings[0]


def test_a_teachers_server_that_does_not_answer_is_refused(closed_port):
    url = f"teacher.url=http://127.0.0.1:{closed_port}/v1"
    given = ["model.path=m", "runner.run_dir=r", "algorithm.distill_coef=1", url]
    (problem,) = network.ask(load(given), "train", elsewhere=False, ask_hub=False).problems
    assert problem.startswith(url) and "start the teacher's server" in problem


def test_a_reward_of_the_running_script_is_refused():
    config = load(["model.path=m", "runner.run_dir=r", "reward.items=[{name: '__main__:mine'}]"])
    (problem,) = names(config)
    assert "move the function to a separate file" in problem


@pytest.mark.parametrize("path", ["models/Qwen3-8B", "models/nothing-like-it"])
def test_a_folder_of_models_is_no_name_of_the_hub(check, monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    code, text = check(f"model.path={path}")
    assert code == 2 and f"model.path={path}: no such folder" in text
    if "Qwen" in path:
        assert "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B" in text


def test_names_that_the_hub_does_not_have_are_refused(monkeypatch):
    said = {"Qwen/Qwen3-8": "no such model", "org/set": "no such dataset"}
    asked = []

    def refusal(name, kind="model"):
        asked.append((name, kind))
        return said.get(name)

    monkeypatch.setattr(hub, "refusal", refusal)
    monkeypatch.setattr(hub, "cached_model", lambda _: None)
    given = ["runner.run_dir=r", "data.train_paths=['hub:org/set','hub:org/other:main:test']"]
    config = load(["model.path=Qwen/Qwen3-8", *given])
    problems = network.ask(config, "train", elsewhere=True, ask_hub=True).problems
    assert problems == [
        "model.path=Qwen/Qwen3-8: no such model; did you mean Qwen/Qwen3-8B?",
        "hub:org/set: no such dataset",
    ]
    assert asked[-1] == ("org/other", "dataset")

    def silent(name, kind="model"):
        raise hub.HubUnreachable("no route")

    monkeypatch.setattr(hub, "refusal", silent)
    answers = network.ask(config, "train", elsewhere=True, ask_hub=True)
    assert not answers.problems and "cannot be asked" in answers.warnings[0]


def test_settings_that_fit_no_known_gpu_are_refused(check):
    gpus = ["model.path=Qwen/Qwen2.5-72B", "model.dtype=bfloat16", "cluster.device=cuda"]
    gpus += ["cluster.gpus_per_node=8", "actor.tensor_parallel=1", "actor.data_parallel=8"]
    code, text = check(*gpus)
    assert code == 2
    assert "these settings fit no known GPU; on the largest, " in text
    assert "rlmath plan layout model.path=Qwen/Qwen2.5-72B" in text


@pytest.fixture
def store():
    with faulty_store() as found:
        yield found


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/run", "needs the package s3fs, which is not installed: pip install s3fs=="),
        ("gs://bucket/run", "needs the package gcsfs"),
        ("hf://owner/name/run", "give a folder in a bucket, hf://buckets/OWNER/BUCKET/FOLDER"),
        ("s3a://bucket/run", "expected a folder such as s3://BUCKET/FOLDER"),
        ("/mnt/run", "expected a folder such as s3://BUCKET/FOLDER"),
        ("memory://bucket/../run", "expected a folder without .."),
        ("memory://", "expected a folder without .."),
        ("file://{tmp_path}/run/mirror", "overlaps runner.run_dir="),
        ("file://{tmp_path}", "overlaps runner.run_dir="),
    ],
)
def test_a_mirror_that_cannot_be_is_refused(check, tmp_path, url, said):
    url = url.format(tmp_path=tmp_path)
    code, text = check(f"runner.mirror='{url}'")
    assert code == 2 and f"runner.mirror={url}: " in text and said in text


def test_a_mirror_is_written_to_before_anything_starts(check, store, monkeypatch):
    url = "runner.mirror='memory://bucket/run'"
    code, text = check(url)
    assert code == 0, text
    assert not store.store, "the check leaves nothing"
    code, text = check(url, "runner.resume='memory://bucket/run'")
    assert code == 2 and "has no complete checkpoint" in text

    def deny(self, path, value, **_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store, "pipe_file", deny)
    code, text = check(url)
    assert code == 2 and "Access Denied" in text and "credentials" in text
    code, text = check("runner.mirror_wait_s=5")
    assert code == 2 and "runner.mirror_wait_s" in text


def test_a_mirror_of_another_run_is_refused(check, store, tmp_path):
    with mirroring(tmp_path / "other", "memory://bucket/run", wait_s=60):
        made = CheckpointStore(tmp_path / "other" / "checkpoints", keep=1)
        (made.begin(3) / "tensors").write_bytes(b"weights")
        made.commit(3, {}, {})
    url = "runner.mirror='memory://bucket/run'"
    code, text = check(url)
    assert code == 2 and "holds another run" in text and str(tmp_path / "other") in text
    code, text = check(url, "runner.resume='memory://bucket/run'")
    assert code == 0 and "step 3" in text and "will be downloaded" in text
    assert not (tmp_path / "run").exists()


BASE = ["model.path=m", "runner.run_dir=r", "runner.steps=6"]


def problems(*overrides, machine=GPU_MACHINE):
    return list(profile_problems(load([*BASE, *overrides]), machine))


def test_steps_are_steps_of_the_run():
    assert problems("runner.profile.steps=[1,6]") == []
    found = problems("runner.profile={steps: [0, 6, 7]}")
    assert ["no step 0" in found[0], "no step 7" in found[1], len(found)] == [True, True, 2]
    assert "1 to 6" in found[1]
    config = load([*BASE, "runner.profile.steps=[7]"])
    of_training, of_evaluation = (
        [one for one in find_problems(config, command, GPU_MACHINE) if "profile" in one]
        for command in ("train", "evaluate")
    )
    assert len(of_training) == 1 and of_evaluation == []


def test_nsys_is_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "runner.profile={steps: [2], tool: nsys}"
    (found,) = problems(wanted)
    assert "runner.profile.tool=nsys" in found and "PATH" in found
    # The nodes of a cluster, and another machine that is checked for, may have it.
    assert problems(wanted, "cluster.ray_address=auto") == []
    assert problems(wanted, machine=dataclasses.replace(GPU_MACHINE, elsewhere=True)) == []
    (tmp_path / "nsys").touch()
    (tmp_path / "nsys").chmod(stat.S_IRWXU)
    assert problems(wanted) == []


@pytest.mark.parametrize("tool", ["nsys", "memory"])
def test_tools_for_gpus_are_refused_on_a_cpu(tool):
    config = load([*BASE, f"runner.profile={{steps: [2], tool: {tool}}}"])
    (found,) = pair_problems(config, Device.cpu, "train")
    assert f"runner.profile.tool={tool}" in found and "use torch" in found
    assert list(pair_problems(config, Device.cuda, "train")) == []
    # An evaluation with the settings of a run profiles nothing.
    assert list(pair_problems(config, Device.cpu, "evaluate")) == []
