"""The package imports what pyproject.toml asks for, and a bare install is the verifier."""

import ast
import functools
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlmath.cli import _PACKAGES
from rlmath.commands.doctor import requirements_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    """Canonical names of the packages, without rlmath itself."""
    return {canonicalize_name(Requirement(one).name) for one in requirements} - {"rlmath"}


def imports(files):
    """Full names of all modules that the files import, in functions too."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module


@functools.cache
def imported_modules():
    """First names of all modules that files of ``rlmath/`` import.

    And the last ones: ``torch.utils.tensorboard`` is of no use without ``tensorboard``.
    """
    found = imports((ROOT / "rlmath").rglob("*.py"))
    return frozenset(name.split(".")[end] for name in found for end in (0, -1))


def test_every_runtime_dependency_is_imported_by_the_package():
    used = {
        canonicalize_name(distribution)
        for module, distributions in packages_distributions().items()
        if module in imported_modules()
        for distribution in distributions
    }
    asked = names(PROJECT["dependencies"]) | names(EXTRAS["common"])
    assert len(asked) > 10
    assert asked <= used, f"only for development, or not used: {sorted(asked - used)}"


def test_the_command_knows_what_the_extras_bring():
    """A missing package is one message with the extra, not a traceback."""
    asked = names(EXTRAS["common"]) | names(EXTRAS["cpu"])
    brought = {
        module
        for module, distributions in packages_distributions().items()
        if asked & {canonicalize_name(one) for one in distributions}
    }
    # Only CUDA machines have the last.
    assert (brought & imported_modules()) | {"transformer_engine"} == set(_PACKAGES)


def test_an_extra_that_an_extra_names_is_asked_for():
    lines = ['rlmath[common]; extra == "cpu"', 'ray>=2; extra == "common"', "sympy"]
    lines += ['vllm; extra == "cuda"']
    found = requirements_of("cpu", map(Requirement, lines))
    assert [one.name for one in found] == ["ray", "sympy"]


def test_verifier_and_rewards_import_little():
    """Statically, in functions too; test_wheel.py imports them with nothing else installed."""
    files = [ROOT / "rlmath" / name for name in ("__init__.py", "cli.py", "errors.py", "types.py")]
    for folder in ("grading", "rewards", "utils"):
        files += (ROOT / "rlmath" / folder).rglob("*.py")
    found = {name.split(".")[0] for name in imports(files)} - sys.stdlib_module_names
    # Siblings of the sandbox's programs; providers in a cloud and the optional
    # reference; and what is imported only when a caller has it already, or for its types.
    found -= {"cell", "cell_protocol", "launcher"}
    found -= {"rlmath", "landlock", "syscalls", "e2b_code_interpreter", "morphcloud", "math_verify"}
    found -= {"torch", "numpy", "transformer_engine", "ray"}
    found -= {"mpmath"}  # SymPy's only dependency, whose version SymPy chooses
    assert found == names(PROJECT["dependencies"])
