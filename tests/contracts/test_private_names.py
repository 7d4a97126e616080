"""Every private name of another library that the code uses has a row in this folder."""

import ast
import re

import pytest

from tests.contracts.imports import FOLDERS, ROOT
from tests.contracts.rows import FOLDER

pytestmark = pytest.mark.filterwarnings("ignore")
# Python's own, and documented.
OF_PYTHON = {"_exit", "_current_frames", "_getframe"}
TABLES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (*FOLDER.glob("*.rows"), *FOLDER.parent.glob("test_*.py"))
    if path.name != "test_contract.py"
)


def private_names():
    """Uses of each private name that no module of the project defines."""
    own, used = set(), {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    own.add(node.id)
                elif isinstance(node, ast.Attribute):
                    of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "ctx")
                    if of_self and isinstance(node.ctx, ast.Store):
                        own.add(node.attr)
                    used[node.attr] = f"{path.relative_to(ROOT)}:{node.lineno}"
                elif isinstance(node, ast.ImportFrom) and not _of_project(node):
                    for alias in node.names:
                        used[alias.name] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return {
        name: where
        for name, where in sorted(used.items())
        if re.match(r"_[^_]", name) and name not in own | OF_PYTHON
    }


def _of_project(node):
    return (node.module or "").partition(".")[0] in FOLDERS


def test_each_has_a_row():
    names = private_names()
    assert len(names) > 12
    without = {
        name: where
        for name, where in names.items()
        if not re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", TABLES)
    }
    assert without == {}, "add rows that say what breaks when these change"


def test_kernels_of_vllms_cpu_build():
    """``torch.ops._C``, for cpu_norms.py and cpu_sampling.py in engines/patches."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("these kernels are in vLLM's CPU build; the CUDA build is installed here")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    for kernel in ("rms_norm", "fused_add_rms_norm", "fused_gumbel_argmax"):
        assert hasattr(torch.ops._C, kernel), kernel
