"""Gloo groups that share one device per process.

torch gives every group its own device, and a device is a thread that wakes up every 10 ms whether
or not anything has arrived. Megatron and vLLM make a dozen groups in each process; on a machine
with few cores their hundreds of threads interrupt the computing ones thousands of times a second,
which took a fifth of a small model's step.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torch.distributed import ProcessGroupGloo

INTERFACE = "GLOO_SOCKET_IFNAME"
# Keyed by process, because a fork does not copy the threads, and by the interfaces requested.
_devices: dict[tuple[int, str], list[Any]] = {}
_own_init = ProcessGroupGloo.__init__


def share_device() -> None:
    """Make all later gloo groups of this process share a device. Idempotent."""
    ProcessGroupGloo.__init__ = _init  # type: ignore[method-assign,assignment]


def use_interface_of(address: str) -> None:
    """Make gloo use the interface with this address, unless the environment names one.

    Without a name gloo takes the address to which the host's name resolves, and tells the others to
    connect there. On Debian and Ubuntu that is 127.0.1.1, which other nodes cannot reach.
    ``address``: address of this node; nothing changes if it is empty or no interface has it.
    """
    import psutil

    # Interfaces without a hardware address have an empty one.
    if not address or os.environ.get(INTERFACE):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ[INTERFACE] = name
            return


def _init(
    self: ProcessGroupGloo,
    store: Any,
    rank: int,
    size: int,
    timeout: Any = datetime.timedelta(minutes=30),
) -> None:
    if isinstance(timeout, datetime.timedelta):
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _shared_devices()
        options._threads = 2 * len(options._devices)
    else:
        # The second form of the constructor takes options in this place.
        options = timeout
    _own_init(self, store, rank, size, options)


def _shared_devices() -> list[Any]:
    """Devices as torch chooses them: for each interface in ``INTERFACE``, or for the host name."""
    interfaces = os.environ.get(INTERFACE, "")
    key = (os.getpid(), interfaces)
    if key not in _devices:
        _devices[key] = [
            ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name
        ] or [ProcessGroupGloo.create_default_device()]
    return _devices[key]
