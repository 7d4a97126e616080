"""Imports vLLM's Qwen3.5 without torchvision, which CPU environments do not have.

vLLM's module of the text model imports image processors of transformers, which import torchvision
without using it. The names below are importable and empty in the engine's processes. Nothing else
sees them: transformers has looked for torchvision before, and a real one is found first.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
FUNCTIONS = f"{NAMES[-1]}.functional"


class _Empty(MetaPathFinder, Loader):
    """Finds empty modules by these names."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in (*NAMES, FUNCTIONS):
            return None
        return ModuleSpec(fullname, self, is_package=fullname in NAMES)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


def install() -> None:
    """Let imports of torchvision succeed in this process; a no-op where it is installed."""
    from transformers.utils.import_utils import is_torchvision_available

    # Cached there.
    if not is_torchvision_available() and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Empty())
