"""The environment is the lock, and the lock is complete."""

import importlib.metadata
import sys

import pytest
import torch

from tests.unit.locks import PYTHONS, installed_packages, read_lock, requirements, unmet


def test_torch_is_the_cuda_build():
    assert torch.version.cuda is not None
    assert importlib.metadata.version("vllm").count("cpu") == 0


def test_every_locked_package_is_installed_in_its_version():
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    lock = read_lock("cuda", here)
    assert {n: p.version for n, p in installed_packages(lock).items()} == lock.versions


@pytest.mark.parametrize("python", PYTHONS)
def test_package_requirements_are_locked_or_left_out(python):
    lock = read_lock("cuda", python)
    packages = installed_packages(lock)
    asked = list(requirements(packages, python))
    assert unmet(lock, asked) == []
    assert lock.without <= {one.name for _, one in asked}
