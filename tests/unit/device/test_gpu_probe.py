"""The probe of a GPU, on the CPU where it computes, and with an nvidia-smi and a kernel's log that
are forged: no GPU is here that could fail."""

import sys

import pytest
import torch

from rlmath.device import gpu_probe, nvidia

SMI = """#!/bin/bash
case $1 in
  *ecc*) echo "{ecc}" ;;
  *bus_id*) {bus} ;;
esac
"""
LOG = """#!/bin/bash
echo "[1.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."
echo "[2.0] NVRM: Xid (PCI:0000:2c:00): 13, pid=1, Graphics Exception"
echo "[3.0] NVRM: Xid (PCI:0000:1b:00): 154, pid=1"
"""
KNOWN = "echo 00000000:1B:00.0"


def forge(folder, monkeypatch, ecc, bus=KNOWN):
    for name, text in (("nvidia-smi", SMI.format(ecc=ecc, bus=bus)), ("dmesg", LOG)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_device_that_computes_passes():
    gpu_probe.check(torch.device("cpu"))


def test_a_device_that_changes_data_or_multiplies_wrongly_fails(monkeypatch):
    for equal, fault in (([False], "copied"), ([True, False], "multiplies")):
        answers = iter(equal)
        monkeypatch.setattr(torch, "equal", lambda *_, answers=answers: next(answers))
        with pytest.raises(RuntimeError, match=fault):
            gpu_probe.check(torch.device("cpu"))


@pytest.mark.parametrize(
    ("ecc", "fault"),
    [
        ("0, No, No", ""),
        ("[N/A], [N/A], [N/A]", ""),
        ("2, No, No", "2 uncorrected ECC errors"),
        ("0, Yes, No", "reset"),
        ("0, No, Yes", "replaced"),
    ],
)
def test_ecc_state_is_a_fault(tmp_path, monkeypatch, ecc, fault):
    forge(tmp_path, monkeypatch, ecc)
    found = nvidia.ecc_fault("3")
    assert fault in found and bool(found) == bool(fault)


def test_report_names_host_gpu_and_xid(tmp_path, monkeypatch):
    forge(tmp_path, monkeypatch, "0, No, Yes")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-17")
    said = gpu_probe.probe("3").describe()
    assert said.startswith("GPU 3 of gpu-17: ") and "XID 79, 154 " in said
    # A GPU that the driver has lost: every GPU's.
    forge(tmp_path, monkeypatch, "0, No, Yes", bus="exit 6")
    assert "XID 79, 13, 154 " in gpu_probe.probe("3").describe()


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("", ""),
        ("import sys; sys.exit('first\\nRuntimeError: CUDA error')", "RuntimeError: CUDA error"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("import os; os.abort()", "code -6"),
    ],
)
def test_a_probe_that_fails_hangs_or_dies_is_a_fault(program, fault):
    found = gpu_probe._fault_of([sys.executable, "-I", "-S", "-c", program], 1.0)
    assert fault in found and bool(found) == bool(fault)
