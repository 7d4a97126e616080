"""House rule: algorithms and batching import torch, numpy and the standard library at most."""

import ast
import sys
from pathlib import Path

import pytest

import rlmath

ROOT = Path(rlmath.__file__).parent
FILES = sorted([*(ROOT / "algorithms").rglob("*.py"), *(ROOT / "batching").rglob("*.py")])
ALLOWED = {*sys.stdlib_module_names, "torch", "numpy"}
OWN = (
    "rlmath.algorithms",
    "rlmath.batching",
    "rlmath.plugins",
    "rlmath.types",
    "rlmath.utils.array_refs",
    "rlmath.utils.lazy_torch",
    "rlmath.utils.setting",
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_algorithms_import_only_allowed_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in ALLOWED or name.startswith(OWN), name
