"""What pyproject.toml asks of every machine is what the package imports."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def imported_modules() -> set[str]:
    """First names of all modules that files of ``rlmath/`` import, in functions too.

    And the last ones: ``torch.utils.tensorboard`` is of no use without ``tensorboard``.
    """
    found = set()
    for file in (ROOT / "rlmath").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[end] for alias in node.names for end in (0, -1)}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module.split(".")[0], node.module.split(".")[-1]}
    return found


def test_every_runtime_dependency_is_imported_by_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = imported_modules()
    used = {
        canonicalize_name(distribution)
        for module, distributions in packages_distributions().items()
        if module in modules
        for distribution in distributions
    }
    asked = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]}
    assert len(asked) > 10
    assert asked <= used, f"only for development, or not used: {sorted(asked - used)}"
