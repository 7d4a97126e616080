"""Messages where torch sees no CUDA device, by what nvidia-smi says of the driver."""

from types import SimpleNamespace

import pytest

import rlmath.device
from rlmath.commands import doctor
from rlmath.errors import UserError
from rlmath.utils import nvidia_driver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes an nvidia-smi that prints something and exits with a code."""

    def make(said, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{said}'\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def test_driver_version_is_read(driver, monkeypatch):
    driver("575.57.08\\n575.57.08\\n")
    assert nvidia_driver.driver_version() == "575.57.08"
    driver("NVIDIA-SMI has failed because it could not communicate with the driver", 9)
    assert nvidia_driver.driver_version() is None
    driver("No devices were found\\n")
    assert nvidia_driver.driver_version() is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert nvidia_driver.driver_version() is None


@pytest.mark.parametrize(
    ("version", "old"),
    [("575.57.08", True), ("579.99", True), ("580.65.06", False), ("590.1", False)],
)
def test_cuda_13_needs_580(version, old):
    assert nvidia_driver.is_too_old(version) is old


@pytest.mark.parametrize(
    ("cuda", "said", "reason"),
    [
        (None, "580.65.06", "setup.sh cuda"),
        ("13.0", "575.57.08", "575.57.08, and CUDA 13.0 needs 580"),
        ("13.0", "580.65.06", "CUDA_VISIBLE_DEVICES"),
        ("13.0", "No devices were found", "--gpus all"),
    ],
)
def test_the_error_names_the_reason(driver, monkeypatch, cuda, said, reason):
    driver(said)
    monkeypatch.setattr(rlmath.device, "cuda_visible", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    with pytest.raises(UserError, match=r"cluster\.device=cuda") as error:
        rlmath.device.choose_platform("cuda")
    assert reason in str(error.value)


def test_doctor_names_the_reason(driver, monkeypatch):
    driver("575.57.08")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    machine = SimpleNamespace(gpus=8, has_cuda=True)
    monkeypatch.setattr(doctor, "Machine", SimpleNamespace(here=lambda: machine))
    (finding,) = doctor.accelerators()
    assert finding.level == "bad" and "needs 580" in finding.text


def test_the_least_compute_capability_is_read(driver, monkeypatch):
    driver("9.0\\n8.0\\n9.0\\n")
    assert nvidia_driver.compute_capability() == (8, 0)
    driver("10.0\\n")
    assert nvidia_driver.compute_capability() == (10, 0)
    for said in ("No devices were found\\n", "[N/A]\\n", ""):
        driver(said)
        assert nvidia_driver.compute_capability() is None
    driver("9.0\\n", 9)
    assert nvidia_driver.compute_capability() is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert nvidia_driver.compute_capability() is None
