"""The layers of the package: imports go down only, also those inside functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlmath"
# From the bottom up. A folder imports itself and what stands below it.
LAYERS = (
    "errors",
    "utils",
    "plugins",
    "model",
    "types",
    "grading",
    "algorithms",
    "batching",
    "config",
    "device",
    "data",
    "rewards",
    "monitor",
    "cluster",
    "checkpoint",
    "vllm_plugin",
    "weights",
    "checks",
    "rollout",
    "actor",
    "validation",
    "evaluation",
    "training",
    "quickstart",
    "commands",
    "cli",
    "__main__",
)
FILES_OF_THE_ROOT = {"__init__.py", "__main__.py", "cli.py", "errors.py", "types.py"}


@functools.cache
def modules() -> list[tuple[str, frozenset[str]]]:
    """Each module, and every ``rlmath.FOLDER`` that it imports."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("rlmath", *file.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found.append((".".join(parts), frozenset(imported(tree))))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Every ``rlmath.FOLDER`` that a module imports, also inside functions and for types only."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names = [node.module]
            if node.module == "rlmath":
                names = [f"rlmath.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("rlmath."):
                yield ".".join(name.split(".")[:2])


def test_files_of_the_root() -> None:
    assert {file.name for file in PACKAGE.glob("*.py")} == FILES_OF_THE_ROOT


def test_every_folder_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {name.removesuffix(".py") for name in FILES_OF_THE_ROOT} - {"__init__"}
    assert folders | files == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down(layer: str) -> None:
    below = {f"rlmath.{name}" for name in LAYERS[: LAYERS.index(layer) + 1]}
    upward = [
        f"{name} imports {target}"
        for name, targets in modules()
        if name.split(".")[1] == layer
        for target in sorted(targets)
        if target not in below
    ]
    assert upward == []
