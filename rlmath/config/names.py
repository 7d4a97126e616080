"""Names that settings choose among, found without importing torch.

The registries fill when their packages are imported, which takes torch and more than a second. A
check of the settings should not, so the names are read from the source. In ``rlmath/algorithms/``
these are ``X = Registry("algorithm.loss")`` and the decorators that file functions in ``X``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def registered_names() -> dict[str, list[str]]:
    """Setting (``algorithm.loss``) to the names that it takes, sorted."""
    spec = find_spec("rlmath.algorithms")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return _names_in([ast.parse(file.read_text(encoding="utf-8")) for file in files])


@cache
def aggregations_of_losses() -> dict[str, tuple[str, ...]]:
    """Loss to the aggregations that it is defined for; a loss that takes any is not among them."""
    spec = find_spec("rlmath.algorithms")
    assert spec is not None and spec.origin is not None
    found = {}
    for file in sorted((Path(spec.origin).parent / "losses").glob("*.py")):
        for call in _calls(ast.parse(file.read_text(encoding="utf-8"))):
            for keyword in call.keywords:
                if _called(call) == "policy_loss" and keyword.arg == "aggregations":
                    found[_text(call)] = ast.literal_eval(keyword.value)
    return found


@cache
def reward_names() -> list[str]:
    """Names of the rewards that come with rlmath, sorted: the keys of the registry's table."""
    spec = find_spec("rlmath")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "rewards" / "registry.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_BUILT_IN":
            return sorted(ast.literal_eval(node.value))
    raise LookupError(f"{file} has no table _BUILT_IN of rewards")


def _names_in(modules: list[ast.Module]) -> dict[str, list[str]]:
    registries: dict[str, str] = {}
    for module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                call = node.value
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if _called(call) == "Registry" and isinstance(target, ast.Name):
                    registries[target.id] = _text(call)
    # A function that registers under its own first argument is a decorator like ``X.register``.
    decorators = {f"{name}.register": setting for name, setting in registries.items()}
    for module in modules:
        for function in (node for node in module.body if isinstance(node, ast.FunctionDef)):
            for call in _calls(function):
                first = function.args.args[0].arg if function.args.args else None
                argument = call.args[0] if call.args else None
                if (
                    _called(call) in decorators
                    and isinstance(argument, ast.Name)
                    and argument.id == first
                ):
                    decorators[function.name] = decorators[_called(call)]
    found: dict[str, list[str]] = {setting: [] for setting in registries.values()}
    for module in modules:
        for call in _calls(module):
            if _called(call) in decorators and _text(call):
                found[decorators[_called(call)]].append(_text(call))
    return {setting: sorted(names) for setting, names in found.items()}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Subscript):  # Registry[Kind](...)
        function = function.value
    return ast.unparse(function)


def _text(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return str(first.value) if is_text and isinstance(first, ast.Constant) else ""
