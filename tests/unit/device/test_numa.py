"""Cores of a process beside its GPU, from a sysfs that is made up: two sockets, four GPUs."""

import os
from types import SimpleNamespace

import pytest

from rlmath.device import numa

SOCKETS = {"0000:1b:00.0": "0-15", "0000:2c:00.0": "0-15", "0000:9b:00.0": "16-31"}
ALL = frozenset(range(32))


@pytest.fixture
def sysfs(tmp_path):
    devices = {bus: ("0x10de", "0x030200", cpus) for bus, cpus in SOCKETS.items()}
    # A GPU's audio function, its switch, and a network card also name cores.
    devices |= {
        "0000:1b:00.1": ("0x10de", "0x040300", "0-15"),
        "0000:05:00.0": ("0x10de", "0x068000", "0-15"),
        "0000:06:00.0": ("0x15b3", "0x020700", "0-15"),
    }
    for bus, texts in devices.items():
        folder = tmp_path / "bus" / "pci" / "devices" / bus
        folder.mkdir(parents=True)
        for name, text in zip(("vendor", "class", "local_cpulist"), texts, strict=True):
            (folder / name).write_text(f"{text}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("bus", "allowed", "ids", "threads"),
    [
        ("0000:1b:00.0", ALL, range(16), 4),  # 16 cores, 2 GPUs, a rank and an engine on each.
        ("0000:9b:00.0", ALL, range(16, 32), 8),
        ("0000:9b:00.0", frozenset(range(20)), range(16, 20), 2),  # As a container allows.
        ("0000:9b:00.0", frozenset(range(4)), range(4), 1),  # None beside it is allowed.
        ("0000:ff:00.0", ALL, range(32), 5),  # Unknown, as in many virtual machines.
    ],
)
def test_a_process_gets_its_share_of_the_cores_beside_its_gpu(sysfs, bus, allowed, ids, threads):
    found = numa.cores_beside(bus, allowed, sysfs)
    assert found == numa.Cores(frozenset(ids), threads)


def test_without_sysfs_all_cores_stay(tmp_path):
    assert numa.cores_beside("0000:1b:00.0", frozenset({3}), tmp_path) == numa.Cores(
        frozenset({3}), 1
    )


def test_a_gpu_is_found_by_its_place_on_the_bus(monkeypatch):
    asked, bound = [], []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, ids: bound.append(ids))
    monkeypatch.setattr(
        numa,
        "cores_beside",
        lambda bus, allowed: asked.append(bus) or numa.Cores(frozenset({0}), 7),
    )
    assert numa.bind_to_gpu(0) == 7
    assert asked == ["0000:1b:00.0"] and bound == [frozenset({0})]
