"""Gloo groups that share one device per process.

torch gives every group its own device, and a device is a thread that wakes up every 10 ms
whether something has arrived or not. Megatron and vLLM make a dozen groups in each process; on a
machine of few cores their hundreds of threads interrupt those that compute thousands of times a
second, which took a fifth of a small model's step.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torch.distributed import ProcessGroupGloo

INTERFACE = "GLOO_SOCKET_IFNAME"
# By process, because a fork does not take the threads along, and by the interfaces asked for.
_devices: dict[tuple[int, str], list[Any]] = {}
_own_init = ProcessGroupGloo.__init__


def share_device() -> None:
    """Have gloo groups that this process makes from now on share a device. Idempotent."""
    ProcessGroupGloo.__init__ = _init  # type: ignore[method-assign,assignment]


def use_interface_of(address: str) -> None:
    """Have gloo use the interface with this address, unless the environment names one.

    Without a name gloo takes the address to which the host's name resolves, and tells the others to
    connect there. On Debian and Ubuntu that is 127.0.1.1, which other nodes cannot reach.

    Args:
        address: Of this node; an empty one, or one that no interface has, changes nothing.
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
        # Its second form takes options in this place.
        options = timeout
    _own_init(self, store, rank, size, options)


def _shared_devices() -> list[Any]:
    """As torch chooses them: of each interface in ``INTERFACE``, or of the host's name."""
    interfaces = os.environ.get(INTERFACE, "")
    key = (os.getpid(), interfaces)
    if key not in _devices:
        _devices[key] = [
            ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name
        ] or [ProcessGroupGloo.create_default_device()]
    return _devices[key]
