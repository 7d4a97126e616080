"""Transformer Engine installed, missing, and installed in part, with packages made for it."""

import importlib
import os
import sys

import pytest
import torch

import rlmath.device
from rlmath.commands import doctor
from rlmath.device import CPU, Platform, choose_platform
from rlmath.errors import UserError
from rlmath.utils import transformer_engine as te_install

pytestmark = pytest.mark.process

ON_CUDA = Platform("cuda", "nccl", "transformer_engine")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a package that Python finds before any other."""

    def make(*, extension="", pytorch="", versions=None):
        (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
        # As published: the top level does not mind that its extension cannot be imported.
        (tmp_path / "transformer_engine" / "__init__.py").write_text(
            "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n"
        )
        (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text(pytorch)
        if extension is not None:
            (tmp_path / extension / "transformer_engine_torch.cpython-311.so").write_bytes(b"")
        for name, version in (versions or {}).items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(te_install, "_site_packages", lambda: tmp_path)
    forget()
    yield make
    forget()


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(rlmath.device, "cuda_visible", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(rlmath.device, "bind_to_gpu", lambda _: 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", "set")


WHOLE = {
    "transformer-engine": "2.11.0",
    "transformer-engine-cu13": "2.11.0",
    "transformer_engine_torch": "2.11.0",
}


@pytest.mark.parametrize("place", ["", "transformer_engine"])
def test_a_complete_installation(install, one_gpu, place):
    install(versions=WHOLE, extension=place)
    assert te_install.missing_part() is None and te_install.import_error() is None
    assert choose_platform("auto") == choose_platform("cuda") == ON_CUDA
    assert choose_platform("cuda", "local").layer_spec == "local"
    ON_CUDA.prepare_megatron_process(0, 1)


def test_one_that_was_built_from_source_has_one_distribution(install):
    install(versions={"transformer-engine": "2.11.0"}, extension="transformer_engine")
    assert te_install.missing_part() is None


def test_the_extension_was_never_built(install, one_gpu):
    install(versions=WHOLE, extension=None)
    assert importlib.util.find_spec("transformer_engine") is not None
    with pytest.raises(UserError, match=r"transformer_engine_torch\*\.so, was not built"):
        choose_platform("cuda")
    with pytest.raises(UserError, match=r"launchers/setup\.sh cuda"):
        choose_platform("auto", "transformer_engine")
    assert choose_platform("cuda", "local").layer_spec == "local"
    assert choose_platform("cuda", "any").layer_spec == "local"


def test_parts_of_different_versions(install):
    install(versions=WHOLE | {"transformer_engine_torch": "2.10.0"})
    problem = te_install.missing_part()
    assert problem is not None and "2.11.0" in problem and "2.10.0" in problem


def test_te_that_is_not_installed_is_refused(install, one_gpu):
    assert te_install.missing_part() == "it is not installed"
    with pytest.raises(UserError, match=r"actor\.layers=local"):
        choose_platform("auto")


def test_a_rank_reports_why_the_import_fails(install, one_gpu):
    """Everything is there, and still a package that the extension needs is not."""
    install(versions=WHOLE, pytorch="import onnxscript_that_nobody_installed")
    assert choose_platform("cuda") == ON_CUDA
    assert importlib.import_module("transformer_engine") is not None
    with pytest.raises(UserError, match=r"ModuleNotFoundError.*onnxscript_that_nobody_installed"):
        ON_CUDA.prepare_megatron_process(0, 1)


def test_doctor_imports_it_and_survives(install, tmp_path, monkeypatch):
    install(versions=WHOLE, pytorch="import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    finding = doctor.transformer_engine()
    assert finding.level == "bad" and "code 3" in finding.text
    package = tmp_path / "transformer_engine" / "pytorch"
    (package / "__init__.py").write_text("")
    # torch's on a CPU.
    (package / "utils.py").write_text("def get_cudnn_version(): return (0, 0, 0)")
    finding = doctor.transformer_engine()
    assert finding.level == "ok" and "2.11.0" in finding.text
    (package / "utils.py").write_text("def get_cudnn_version(): return (9, 1, 0)")
    finding = doctor.transformer_engine()
    assert finding.level == "bad" and "9.1.0" in finding.text and "CUDNN_HOME" in finding.text


def test_local_layers_never_meet_a_broken_one(install, one_gpu):
    """Megatron would subclass layers of the half that imports."""
    install(versions=WHOLE, pytorch="raise OSError('undefined symbol')")
    Platform("cuda", "nccl", "local").prepare_megatron_process(0, 1)
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
    assert importlib.util.find_spec("transformer_engine") is None


def test_a_cpu_has_local_layers(monkeypatch):
    monkeypatch.setattr(rlmath.device, "cuda_visible", lambda: False)
    assert choose_platform("auto") == choose_platform("cpu", "local") == CPU
    with pytest.raises(UserError, match=r"actor\.layers=transformer_engine"):
        choose_platform("cpu", "transformer_engine")
    with pytest.raises(UserError, match="sees no CUDA device"):
        choose_platform("cuda")


def test_te_loads_packaged_libraries_before_the_systems(tmp_path, monkeypatch):
    """Torch has loaded the packages' cuDNN; with a second one, fused attention fails."""
    variables = ("CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(te_install, "_site_packages", lambda: tmp_path)
    te_install.use_packaged_libraries()
    assert not set(variables) & set(os.environ)
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13").mkdir()
    monkeypatch.setenv("CURAND_HOME", "/opt/mine")
    te_install.use_packaged_libraries()
    found = [os.environ.pop(name) for name in variables]
    packages = tmp_path / "nvidia"
    assert found == [str(packages / "cudnn"), str(packages / "cu13"), "/opt/mine"]
