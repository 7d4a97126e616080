"""Ray's job server and health endpoints, which ``launchers/kuberay.yaml`` needs, with the packages
that requirements/cuda.lock has for them, in an environment that has them apart."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

APART = Path(sys.prefix) / "ray-default"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [str(one.getsockname()[1]) for one in servers]


@pytest.fixture
def environment():
    if not APART.is_dir():
        pytest.skip("launchers/test.sh installs the packages of Ray's job server")
    own = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    return own | {
        "PYTHONPATH": str(APART),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture
def head(environment):
    """A head as ``ray start`` makes it; the ports of its job server and of its node's agent."""
    port, jobs, agent, grpc, metrics = free_ports(5)
    # A short name: Ray's sockets are in it.
    folder = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
    command = [*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "2"]
    command += ["--node-ip-address", "127.0.0.1", "--port", port, "--dashboard-port", jobs]
    command += ["--dashboard-agent-listen-port", agent, "--dashboard-agent-grpc-port", grpc]
    command += ["--metrics-export-port", metrics, "--temp-dir", str(folder)]
    command += ["--object-store-memory", str(80 * 2**20)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield jobs, agent
    finally:
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(one.pid) == process.pid:
                    one.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def answer(url):
    """Answer of an endpoint, which is not there at once."""
    deadline = time.monotonic() + 90
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return str(reply.read().decode())
        except OSError as error:
            assert time.monotonic() < deadline, f"{url}: {error}"
            time.sleep(0.2)


# A minute on a busy machine. By default tests/unit/test_locks.py holds the lock to these packages.
@pytest.mark.long
def test_kuberay_probes_succeed_and_a_job_runs(head, environment):
    """The pods' probes, and what a RayJob's entrypoint is started by."""
    jobs, agent = head
    assert "success" in answer(f"http://127.0.0.1:{agent}/api/local_raylet_healthz")
    assert "success" in answer(f"http://127.0.0.1:{jobs}/api/gcs_healthz")
    submit = [*RAY, "job", "submit", "--address", f"http://127.0.0.1:{jobs}", "--", "true"]
    done = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
