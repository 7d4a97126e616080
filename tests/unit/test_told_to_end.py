"""A run over several nodes that is told to end saves while Ray is there on all of them: the scripts
as they are, with a Ray that only listens and a driver that takes its time to save."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
# In the place of the environment's Python: it tells by its arguments what it is to be.
PYTHON = """#!{python} -IS
import os, signal, socket, sys, time
folder, words = {folder!r}, " ".join(sys.argv[1:])

def note(name, text="yes"):
    with open(os.path.join(folder, name), "a") as file:
        file.write(text + "\\n")

def ray_answers():
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
    except OSError:
        return False
    return not os.path.exists(os.path.join(folder, "ray_ended"))

if words.startswith("-c"):
    print("x" * 64 if "secrets" in words else "127.0.0.1")
elif " start " in words:  # Ray on a node.
    note("pids", str(os.getpid()))
    note("interface", os.environ["GLOO_SOCKET_IFNAME"])
    note("register_s", os.environ["RAY_worker_register_timeout_seconds"])
    note("cores", sys.argv[sys.argv.index("--num-cpus") + 1])
    signal.signal(signal.SIGTERM, lambda *_: (note("ray_ended"), os._exit(0)))
    if "--head" in words:
        server = socket.create_server(("127.0.0.1", {port}), backlog=99)
    print("Ray runtime started", flush=True)
    time.sleep(60)
elif "rlmath train" in words and os.path.exists(os.path.join(folder, "gpu_breaks")):
    with open(os.environ["RLMATH_BAD_NODES"], "w") as file:
        file.write("gpu-7\\n")
    os._exit(75)
elif "rlmath train" in words:
    def end(*_):
        note("told")
        time.sleep(3)
        note("saved", "with Ray" if ray_answers() else "without Ray")
        os._exit(143)
    signal.signal(signal.SIGTERM, end)
    note("pids", str(os.getpid()))
    note("training", words)
    time.sleep(60)
"""
SRUN = """#!/bin/bash
# One task for each of two nodes; ended by no signal, as a step is by none to the batch script.
trap '' TERM
while [[ $1 = --* ]]; do echo "$1" >>{folder}/srun; shift; done
tasks=()
for rank in 0 1; do
  (trap - TERM; SLURM_PROCID=$rank exec "$@") & tasks+=($!)
done
code=0
for task in "${{tasks[@]}}"; do wait "$task" || code=$?; done
exit "$code"
"""
# A job that its user has start without a node; at a requeue Slurm tells its script to end.
SCONTROL = """#!/bin/bash
echo "$*" >>{folder}/scontrol
[ "$1" != show ] || echo "   ReqNodeList=(null) ExcNodeList=gpu-3"
[ "$1" != requeue ] || kill -TERM $PPID
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def environment(tmp_path):
    """Environment of a run whose Ray and driver are fakes, in a separate clone."""
    for name in ("launchers", "ray_utils"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tools = tmp_path / "tools"
    tools.mkdir()
    executable(
        tools / "python", PYTHON.format(python=sys.executable, folder=str(tmp_path), port=port)
    )
    executable(tools / "srun", SRUN.format(folder=tmp_path))
    executable(tools / "scontrol", SCONTROL.format(folder=tmp_path))
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RLMATH_PYTHON": str(tools / "python"),
        "RLMATH_SHARED_DIR": str(tmp_path / "shared"),
        "RLMATH_STATE_DIR": str(tmp_path / "state"),
        "RAY_PORT": str(port),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "96",
        "OMP_NUM_THREADS": "999",
        "GPUS_PER_NODE": "4",
        "RLMATH_RUN_ID": "7",
        "WORLD_SIZE": "2",
    }


def until(there):
    """A file is there before what is written to it is."""
    deadline = time.monotonic() + 60
    while not read(there):
        assert time.monotonic() < deadline, f"no {there.name}"
        time.sleep(0.05)


def start(tmp_path, environment, *command):
    return subprocess.Popen(
        ["bash", *command],
        cwd=tmp_path / "clone",
        env=environment,
        stdout=(tmp_path / "log").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.fixture
def tidy(tmp_path):
    """No fake outlives a test that fails."""
    yield
    pids = tmp_path / "pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        # Its number may have been given out again.
        if str(tmp_path).encode() in read(Path(f"/proc/{pid}/cmdline")):
            os.kill(int(pid), signal.SIGKILL)


def read(file):
    try:
        return file.read_bytes()
    except OSError:
        return b""


def has_saved(tmp_path):
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "told").read_text() == "yes\n", log
    assert (tmp_path / "saved").read_text() == "with Ray\n", log
    assert (tmp_path / "shared" / "exit_code.7").read_text() == "143\n", log
    assert not (tmp_path / "shared" / "end.7").exists()
    assert (tmp_path / "ray_ended").read_text().count("yes") == 2, log


@pytest.mark.usefixtures("tidy")
def test_sigterm_to_the_batch_script_saves_the_run(tmp_path, environment):
    """Twice, as a second signal must not cut the saving short."""
    job = start(tmp_path, environment, "launchers/slurm.sbatch", "quickstart", "seed=3")
    until(tmp_path / "training")
    given = (tmp_path / "training").read_text()
    assert "cluster.nodes=2 cluster.gpus_per_node=4" in given
    assert given.endswith("runner.grace_s=240 seed=3\n")
    os.kill(job.pid, signal.SIGTERM)
    until(tmp_path / "told")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(60) == 143
    has_saved(tmp_path)
    options = (tmp_path / "srun").read_text().split()
    assert {"--cpus-per-task=96", "--cpu-bind=none", "--mem=0"} <= set(options)
    # Without --interface, gloo uses that of Ray's address.
    assert (tmp_path / "interface").read_text().split() == ["lo", "lo"]
    # Environments on shared disks take longer to import than the minute that Ray allows a worker.
    assert (tmp_path / "register_s").read_text().split() == ["300", "300"]
    cores = str(len(os.sched_getaffinity(0)))
    assert (tmp_path / "cores").read_text().split() == [cores, cores]


@pytest.mark.usefixtures("tidy")
def test_a_job_with_a_broken_gpu_is_requeued_once_without_its_node(tmp_path, environment):
    """Slurm changes the nodes of a job that waits alone, so after the requeue, which tells the
    script to end. A node that comes again all the same ends the job."""
    (tmp_path / "gpu_breaks").touch()
    for times in (1, 2):
        job = start(tmp_path, environment, "launchers/slurm.sbatch", "quickstart")
        assert job.wait(60) == 75
        calls = (tmp_path / "scontrol").read_text().splitlines()
        assert calls == ["show job 7", "requeue 7", "update JobId=7 ExcNodeList=gpu-3,gpu-7"], times


@pytest.mark.usefixtures("tidy")
def test_sigterm_to_every_task_saves_the_run(tmp_path, environment):
    """As scancel and preemption do it: each task with its process group, and more than once."""
    script = ("launchers/launch_cluster.sh", "8", "quickstart")
    tasks = [start(tmp_path, environment | {"RANK": rank}, *script) for rank in ("0", "1")]
    until(tmp_path / "training")
    while "has joined" not in (tmp_path / "log").read_text():
        time.sleep(0.05)
    time.sleep(1)  # Until start_ray.sh, which says so last, has ended.
    for _ in range(2):
        for task in tasks:
            os.killpg(task.pid, signal.SIGTERM)
        until(tmp_path / "told")
    assert [task.wait(60) for task in tasks] == [143, 143]
    has_saved(tmp_path)
    # Ray finds no other address on a host without a default route.
    assert "is 127.0.0.1, where other nodes do not reach it" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("tidy")
def test_a_node_that_the_head_gave_up_joins_it_again(tmp_path, environment):
    """As after a pause of its machine: the run continues."""
    script = ("launchers/launch_cluster.sh", "8", "quickstart")
    tasks = [start(tmp_path, environment | {"RANK": rank}, *script) for rank in ("0", "1")]
    until(tmp_path / "training")
    of_node = tmp_path / "state" / "7" / "rank_1.pid"
    for joined in (1, 2):
        while (tmp_path / "log").read_text().count("has joined") < joined:
            time.sleep(0.05)
        if joined == 1:
            os.kill(int(of_node.read_text()), signal.SIGKILL)
    assert "the head answers: joining it again" in (tmp_path / "log").read_text()
    os.kill(tasks[0].pid, signal.SIGTERM)
    assert [task.wait(60) for task in tasks] == [143, 143]
    has_saved(tmp_path)


@pytest.mark.usefixtures("tidy")
def test_requeued_job_trains_after_sigterm(tmp_path, environment):
    """The file that told its first life to end does not tell its second one, and its head's old
    address, where another job's head may be by now, is gone before a node can read it."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "end.7").touch()
    (tmp_path / "shared" / "ray_address.7").write_text("127.0.0.1:22\n")
    job = start(tmp_path, environment, "launchers/slurm.sbatch", "quickstart")
    until(tmp_path / "srun")
    assert ":22" not in read(tmp_path / "shared" / "ray_address.7").decode()
    until(tmp_path / "training")
    time.sleep(2)  # The file is looked for each second.
    assert not (tmp_path / "told").exists()
    (tmp_path / "shared" / "end.7").touch()  # Also by hand.
    assert job.wait(60) == 143
    has_saved(tmp_path)
