"""Nodes on one machine: network namespaces on one bridge, each with its own address."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """A namespace with the interface ``eth0``."""

    namespace: str
    address: str

    def command(self, *arguments):
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def pids(self):
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=20
        )
        return [int(line) for line in listed.stdout.split()]

    def commands(self):
        """Their numbers and command lines."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found.append(f"{pid} {' '.join(words)}")
        return found

    def kill_all(self):
        """The machine dies."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@functools.cache
def why_not():
    """Reason that namespaces cannot be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with nodes(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


@contextlib.contextmanager
def nodes(count):
    """``count`` nodes that reach each other and nothing else; removed at the end with their
    processes."""
    prefix = f"rlmath{os.getpid()}"
    switch = f"{prefix}sw"
    made = []
    found = []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for index in range(count):
            node = Node(f"{prefix}n{index}", f"10.77.0.{index + 1}")
            _ip("netns", "add", node.namespace)
            made.append(node.namespace)
            port = f"p{index}"
            peer = ("peer", "name", "eth0", "netns", node.namespace)
            _ip("link", "add", port, "netns", switch, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", node.namespace, "link", "set", "eth0", "up")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
            found.append(node)
        yield found
    finally:
        for node in found:
            node.kill_all()
        for name in reversed(made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
