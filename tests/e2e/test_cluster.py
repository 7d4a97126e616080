"""Several nodes on one machine, each in a network namespace, with the scripts that users run."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.e2e.nodes import nodes, why_not
from tests.e2e.runs import ROOT, metrics, quickstart_settings

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
INTERFACE = "--interface eth0 --num-cpus 4 --object-store-mib 100"


def environment(folder, rank, world, **more):
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "RLMATH_SHARED_DIR": str(folder / "shared"),
        "RLMATH_STATE_DIR": str(folder / "state"),
        "RLMATH_RUN_ID": "test",
        "RLMATH_PYTHON": sys.executable,
        "RAY_OPTIONS": INTERFACE,
        **more,
    }


def script(node, name, folder, rank, world, *arguments, **more):
    return subprocess.run(
        node.command("bash", name, *arguments),
        cwd=ROOT,
        env=environment(folder, rank, world, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def across_nodes(material, run_dir):
    """Two small steps of the quickstart, the engine on the first node, the actor on the others."""
    return [
        *quickstart_settings(material, run_dir)[1:],
        "cluster.placement=separate",
        "runner.check_export_sequences=0",
        "data.eval_paths=[]",
        f"reward.items=[{{name: '{ROOT / 'tests' / 'e2e' / 'odd_reward.py'}:odd'}}]",
    ]


@pytest.mark.long
def test_engine_on_one_node_and_megatron_on_the_others(material, tmp_path):
    """Two tensor-parallel ranks on two nodes, the engine on a third; the last node comes late."""
    world = 3
    run_dir = tmp_path / "run"
    settings = across_nodes(material, run_dir)
    (tmp_path / "shared").mkdir()
    # An earlier run's address: nobody listens there.
    (tmp_path / "shared" / "ray_address.test").write_text("10.77.0.9:6379\n")
    with nodes(world) as members:
        logs = [(tmp_path / f"rank_{rank}.txt").open("w") for rank in range(world)]
        processes = []
        for rank in (1, 0, 2):
            processes.append(
                subprocess.Popen(
                    members[rank].command(
                        "bash", "launchers/launch_cluster.sh", "12", "quickstart", *settings
                    ),
                    cwd=ROOT,
                    env=environment(tmp_path, rank, world),
                    stdout=logs[rank],
                    stderr=subprocess.STDOUT,
                )
            )
            time.sleep(3)
        codes = [process.wait(timeout=500) for process in processes]
        for log in logs:
            log.close()
    texts = [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(world)]
    assert codes == [0, 0, 0], "\n".join(texts)
    assert "cluster is complete: 3 nodes, 12 CPU slots" in texts[0]
    assert "waiting for the head" in texts[1]
    # Either of them may join first.
    assert re.search(r"missing [12] of 3 nodes \(RANK [12]", texts[0]), texts[0]
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    # The first step has changed the weights, the second one's samples are of what crossed nodes.
    assert lines[0]["train/grad_norm"] > 0
    assert all(line["alignment/mean_exp_abs_diff"] < 1.0001 for line in lines)
    assert not list((tmp_path / "state" / "test").glob("*.pid"))


def test_cluster_scripts_name_what_is_missing(tmp_path):
    """No head, a stale address, no such interface, a missing node."""
    with nodes(2) as (first, second):
        none = script(second, "ray_utils/start_ray.sh", tmp_path, 1, 2, "--timeout-s", "1")
        assert none.returncode == 2
        assert "RANK 0 has not written" in none.stderr
        file = tmp_path / "shared" / "ray_address.test"
        file.write_text("10.77.0.1:6379\n")
        stale = script(second, "ray_utils/start_ray.sh", tmp_path, 1, 2, "--timeout-s", "1")
        assert stale.returncode == 2
        assert "10.77.0.1:6379, where nobody listens" in stale.stderr
        wrong = script(first, "ray_utils/start_ray.sh", tmp_path, 0, 2, "--interface", "eth7")
        assert wrong.returncode == 2
        assert "no such interface" in wrong.stderr
        assert "eth0" in wrong.stderr
        try:
            head = script(first, "ray_utils/start_ray.sh", tmp_path, 0, 2, *INTERFACE.split())
            assert head.returncode == 0, head.stdout + head.stderr
            assert file.read_text() == "10.77.0.1:6379\n"
            # Who does not know the run's token is not served.
            token = tmp_path / "shared" / "ray_token.test"
            assert token.stat().st_mode & 0o077 == 0 and len(token.read_text()) == 64
            unknown = {"RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "1"}
            stranger = script(first, "ray_utils/check_ray.sh", tmp_path, 0, 1, "1", **unknown)
            assert stranger.returncode == 2
            assert "does not accept this run's token" in stranger.stderr
            missing = script(first, "ray_utils/check_ray.sh", tmp_path, 0, 2, "6", "2")
            assert missing.returncode == 2
            assert "1 of 2 nodes (RANK 1) and 2 of 6 CPU slots" in missing.stderr
            assert "waiting: 1 nodes, 4 CPU slots have joined" in missing.stdout
            enough = script(first, "ray_utils/check_ray.sh", tmp_path, 0, 1, "3", "20")
            assert enough.returncode == 0, enough.stderr
        finally:
            stopped = script(first, "ray_utils/stop_ray.sh", tmp_path, 0, 2)
        assert "stopped" in stopped.stdout
        assert not file.exists() and not token.exists()
        again = script(first, "ray_utils/stop_ray.sh", tmp_path, 0, 2)
        assert again.returncode == 0
        assert "nothing to stop" in again.stdout


def test_two_nodes_train_until_the_head_is_lost(material, tmp_path):
    """The engine on one node, Megatron on the other; then the first node dies in the middle of a
    step, and the other, left without an exit code of RANK 0, exits with 1 and leaves nothing."""
    run_dir = tmp_path / "run"
    settings = [*across_nodes(material, run_dir), "runner.steps=1000"]
    with nodes(2) as members:
        processes = []
        for rank in (0, 1):
            with (tmp_path / f"rank_{rank}.txt").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        members[rank].command(
                            "bash", "launchers/launch_cluster.sh", "8", "quickstart", *settings
                        ),
                        cwd=ROOT,
                        env=environment(
                            tmp_path, rank, 2, RAY_gcs_rpc_server_reconnect_timeout_s="3"
                        ),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            deadline = time.monotonic() + 400
            while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
                assert time.monotonic() < deadline, (tmp_path / "rank_0.txt").read_text()
                assert processes[0].poll() is None, (tmp_path / "rank_0.txt").read_text()
                time.sleep(0.5)
            members[0].kill_all()
            code = processes[1].wait(timeout=120)
            deadline = time.monotonic() + 20
            while (left := members[1].commands()) and time.monotonic() < deadline:
                time.sleep(0.2)  # Killed processes take a moment to end.
        finally:
            for process, member in zip(processes, members, strict=True):
                member.kill_all()
                process.wait(timeout=20)
    text = (tmp_path / "rank_1.txt").read_text()
    assert code == 1, text
    assert "the head is lost" in text
    assert left == []
    lines = metrics(run_dir)
    assert [line["step"] for line in lines[:2]] == [1, 2]
    assert all(line["alignment/mean_exp_abs_diff"] < 1.0001 for line in lines)


# Scripts without nodes: tests/unit/test_scripts.py.
@pytest.mark.long
def test_a_node_that_never_comes_ends_all_with_the_same_code(tmp_path):
    with nodes(2) as members:
        processes = [
            subprocess.Popen(
                member.command("bash", "launchers/launch_cluster.sh", "12", "quickstart"),
                cwd=ROOT,
                env=environment(tmp_path, rank, 3, RLMATH_CHECK_TIMEOUT_S="10"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, member in enumerate(members)
        ]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], "\n".join(outputs)
    assert "is still missing 1 of 3 nodes (RANK 2) and 4 of 12 CPU slots" in outputs[0]
    assert "RANK 0 has ended with exit code 2" in outputs[1]


def test_namespaces_are_apart():
    """Or the tests above would show nothing: a node does not reach this machine's loopback."""
    with nodes(1) as (node,), socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        tried = subprocess.run(node.command("bash", "-c", probe), capture_output=True, check=False)
        assert tried.returncode != 0
