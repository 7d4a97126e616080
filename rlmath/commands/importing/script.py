"""A TRL script: literals, constants that it assigns, the keyword arguments of ``GRPOConfig``, and
the model, rewards and data set of its ``GRPOTrainer``. Nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlmath.errors import UserError

OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
# Rewards of TRL that rlmath has by another name.
_REWARDS_OF_TRL = {"accuracy_reward": "math"}
_FILES = ("csv", "json", "parquet", "arrow")


def python_settings(file: Path, text: str, unread: list[str]) -> dict[str, Any]:
    """The keyword arguments of ``GRPOConfig`` and what the script says beside it. Raises UserError:
    the script is no Python, or has no ``GRPOConfig(...)``."""
    try:
        tree = ast.parse(_without_magics(text))
    except SyntaxError as error:
        raise UserError(f"{file}: is no Python (line {error.lineno}: {error.msg})") from error
    names = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [one for one in calls if _called_name(one) == "GRPOConfig"]
    if not configs:
        raise UserError(f"{file}: has no GRPOConfig(...); give the script that makes one")
    values: dict[str, Any] = {}
    for call in calls:
        kind = _called_name(call)
        if kind == "from_pretrained" and "model_name_or_path" not in values:
            _take(values, "model_name_or_path", _argument(call, "model_name", 0), names)
        elif kind in ("LoraConfig", "get_peft_model"):
            for theirs in ("r", "lora_alpha", "target_modules"):
                _take(values, theirs, _argument(call, theirs), names)
        elif kind == "GRPOTrainer":
            model = _argument(call, "model", 0)
            _take(values, "model_name_or_path", model, names)
            if rewards := _rewards(call, tree, file):
                values["reward_funcs"] = rewards
            _take_dataset(values, call, tree, names, unread)
    for keyword in configs[-1].keywords:
        if keyword.arg is None:
            unread.append(f"{file}: **{ast.unparse(keyword.value)} of GRPOConfig is not read")
        elif not _take(values, keyword.arg, keyword.value, names):
            unread.append(
                f"{file}: {keyword.arg}={ast.unparse(keyword.value)} is no literal; set it by hand"
            )
    return values


def _rewards(trainer: ast.Call, tree: ast.Module, file: Path) -> list[str]:
    """Rewards as the settings name them; a function of the script is ``FILE:NAME``."""
    given = _argument(trainer, "reward_funcs", 1)
    listed = given.elts if isinstance(given, ast.List) else [given] if given else []
    places = {
        one.name: f"{file}:{one.name}"
        for one in tree.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            beside = file.parent / f"{node.module.replace('.', '/')}.py"
            place = beside if beside.is_file() else node.module
            for one in node.names:
                own = _REWARDS_OF_TRL.get(one.name) if node.module.startswith("trl") else None
                places[one.asname or one.name] = own or f"{place}:{one.name}"
    return [places.get(one.id, one.id) for one in listed if isinstance(one, ast.Name)]


def _take_dataset(
    values: dict[str, Any],
    trainer: ast.Call,
    tree: ast.Module,
    names: Mapping[str, Any],
    unread: list[str],
) -> None:
    """Take the training data, if the script trains on it as it is loaded."""
    given = _argument(trainer, "train_dataset", 3)
    if given is None:
        return
    made = [given]
    if isinstance(given, ast.Name):
        assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
        made = [one.value for one in assigned if ast.unparse(one.targets[0]) == given.id]
    last = made[-1] if len(made) == 1 else None
    split = None
    if isinstance(last, ast.Subscript):  # load_dataset(...)["train"]
        split, last = last.slice, last.value
    if isinstance(last, ast.Call) and _called_name(last) == "load_dataset":
        files = _argument(last, "data_files")
        split = split or _argument(last, "split")
        name = _argument(last, "path", 0)
        if isinstance(name, ast.Constant) and name.value in _FILES and files is not None:
            name, split = files, None
        if _take(values, "dataset_name", name, names):
            _take(values, "dataset_config", _argument(last, "name", 1), names)
            _take(values, "dataset_train_split", split, names)
            return
    unread.append(
        "train_dataset: the script makes or changes it; write its rows to a file, as with "
        "train_dataset.to_json('train.jsonl'), and set data.train_paths"
    )


def rewards_module(text: str, functions: list[str]) -> str:
    """The source of functions of a script, with what they use from it, in the script's order."""
    source = _without_magics(text)
    lines, tree = source.splitlines(), ast.parse(source)
    defined = [(node, set(_defines(node))) for node in tree.body]
    used: set[str] = set()
    names = list(functions)
    while names:
        name = names.pop()
        if name not in used:
            used.add(name)
            for node, own in defined:
                if name in own and not isinstance(node, ast.Import | ast.ImportFrom):
                    names += [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    parts = []
    for node, own in defined:
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_future = getattr(node, "module", "") == "__future__"
            node.names = [one for one in node.names if _bound_name(one) in used or is_future]
            if node.names:
                parts.append(ast.unparse(node))
        elif own & used:
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n".join(parts) + "\n"


def _defines(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from map(_bound_name, node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for one in (name for target in targets for name in ast.walk(target)):
            if isinstance(one, ast.Name):
                yield one.id


def _bound_name(name: ast.alias) -> str:
    return name.asname or name.name.partition(".")[0]


def _without_magics(text: str) -> str:
    """Without the lines of a notebook that are no Python."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", text, flags=re.MULTILINE)


def _called_name(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    found = [one.value for one in call.keywords if one.arg == name]
    if found:
        return found[0]
    is_there = position is not None and position < len(call.args)
    return call.args[position] if is_there and position is not None else None


def _take(
    values: dict[str, Any], key: str, node: ast.expr | None, names: Mapping[str, Any]
) -> bool:
    """Take a value that the script has as a literal; whether it does."""
    if node is None:
        return False
    try:
        values[key] = _literal(node, names)
    except ValueError:
        return False
    return True


def _constants(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = _literal(node.value, found)
            except ValueError:
                continue
    return found


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one, names) for one in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _literal(node.left, names), _literal(node.right, names)
        if all(isinstance(one, int | float) for one in (left, right)):
            return OPERATIONS[type(node.op)](left, right)
    try:
        found = ast.literal_eval(node)
        if "Ellipsis" in repr(found):
            raise ValueError("a part that is left out")
        return found
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(ast.unparse(node)) from error
