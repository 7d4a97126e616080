import os
from types import SimpleNamespace

import psutil
import pytest

from rlmath.device.gloo import INTERFACE, use_interface_of


@pytest.mark.parametrize(
    ("address", "chosen", "expected"),
    [
        ("10.0.0.7", "", "eth1"),
        ("127.0.0.1", "", "lo"),
        ("10.0.0.7", "ib0", "ib0"),
        ("192.168.9.9", "", None),
        ("", "", None),
    ],
)
def test_gloo_uses_the_interface_with_the_nodes_address_unless_one_is_chosen(
    address, chosen, expected, monkeypatch
):
    def of(*addresses):
        return [SimpleNamespace(address=one) for one in addresses]

    interfaces = {
        "lo": of("127.0.0.1"),
        "tun0": of(""),
        "eth0": of("10.0.1.7"),
        "eth1": of("10.0.0.7"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setenv(INTERFACE, chosen)
    if not chosen:
        monkeypatch.delenv(INTERFACE)
    use_interface_of(address)
    assert os.environ.get(INTERFACE) == expected
    monkeypatch.delenv(INTERFACE, raising=False)
