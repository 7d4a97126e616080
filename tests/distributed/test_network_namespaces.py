"""Ranks on two hosts whose names resolve to 127.0.1.1, as on Debian and Ubuntu: two network
namespaces, each with its own hosts file."""

import os
import shutil
import subprocess
import sys

import pytest

HOST = "rlmath-node"
# A rank as ActorWorker.start makes one, but on CPU: gloo carries everything.
RANK = """
import os
import sys
rank, own, node_address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from rlmath.device import CPU
CPU.prepare_megatron_process(0, num_threads=1)
import torch.distributed as dist
from rlmath.actor.parallel import initialize
from rlmath.model.parallel import Layout
initialize(Layout(1, 1, 2), CPU, rank, own, 29400, seed=0, timeout_s=30, node_address=node_address)
from rlmath.checkpoint.writer import background_group
found = [None, None]
dist.all_gather_object(found, rank, group=background_group())
assert found == [0, 1], found
os._exit(0)  # At the interpreter's end, a thread of gloo may still run, which aborts.
"""


class Node:
    """A separate host: network, name and hosts file. It runs until its standard input ends."""

    def __init__(self, folder, number):
        self.address = f"10.213.77.{number + 1}"
        hosts = folder / f"hosts_{number}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOST}{number}\n")
        script = (
            f"mount --bind {hosts} /etc/hosts && hostname {HOST}{number} && ip link set lo up"
            " && echo up && cat >/dev/null"
        )
        self.process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.is_up = self.process.stdout.readline() == b"up\n"

    def enter(self, *command):
        return ["nsenter", "-t", str(self.process.pid), "-n", "-m", "-u", *command]

    def close(self):
        self.process.communicate()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    folder = tmp_path_factory.mktemp("hosts")
    found = [Node(folder, number) for number in range(2)]
    try:
        if not all(node.is_up for node in found):
            pytest.skip("this container may not make network namespaces")
        one, other = (str(node.process.pid) for node in found)
        link = f"ip link add rlmath0 netns {one} type veth peer name rlmath0 netns {other}"
        if subprocess.run(link.split(), capture_output=True, check=False).returncode:
            pytest.skip("this container may not make network interfaces")
        for node in found:
            for command in (f"addr add {node.address}/24 dev rlmath0", "link set rlmath0 up"):
                subprocess.run(node.enter("ip", *command.split()), check=True)
        yield found
    finally:
        for node in found:
            node.close()


def run_ranks(nodes, addresses):
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    ranks = [
        subprocess.Popen(
            node.enter(sys.executable, "-c", RANK, str(rank), nodes[0].address, addresses[rank]),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def test_gloo_group_of_all_ranks_uses_the_node_address_when_host_names_are_loopback(nodes):
    found = run_ranks(nodes, [node.address for node in nodes])
    assert [code for code, _ in found] == [0, 0], found
