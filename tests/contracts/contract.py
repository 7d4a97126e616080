"""Names of other libraries that the code relies on, one row each, and how a row is checked.

A row names something in a package, says what about it is relied on, and what breaks without it::

    Row(
        "vllm.v1.core.sched.scheduler:Scheduler",
        has=("schedule", "running"),
        breaks="CPU engines cannot schedule decode steps (rlmath/engines/patches/cpu_scheduler.py)",
    )

Modules that import on this machine are imported. Others (CUDA only) are read: their source is
parsed, and names, parameters and attributes are looked up in it.
"""

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_MISSING = object()


@dataclass(frozen=True)
class Row:
    """One thing that the code relies on.

    Attributes:
        target: ``module`` or ``module:qualified.name``.
        breaks: Effect on the code when the row no longer holds.
        has: Attributes of the target. Of a class also those that its methods, or its bases',
            assign to ``self``.
        takes: Parameters that the code passes, in the order of positional use where it is
            positional; checked by name. Of a class: of its ``__init__``.
        passes: Parameters that the library passes to our replacement of the target, which has to
            name all of them: the complete list, in order, without ``self``.
        fields: Fields of a dataclass that the code sets.
        all_fields: The complete list of a dataclass's fields: the code builds it, and a field that
            is new would silently be left at its default.
        equals: The value of a constant.
        says: Text that has to stand in the target's source, for behavior that no signature shows.
    """

    target: str
    breaks: str
    has: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    passes: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    all_fields: tuple[str, ...] | None = None
    equals: Any = field(default=_MISSING)
    says: tuple[str, ...] = ()


def parametrize(rows):
    """Runs a test once per row: ``@parametrize(ROWS) def test_...(row): check(row)``."""
    return pytest.mark.parametrize("row", list(rows), ids=lambda row: row.target)


def check(row):
    """Fails, saying what breaks, unless the row holds for the installed packages."""
    found = find(row.target)
    if found is _MISSING:
        pytest.fail(f"{row.target} is gone: {row.breaks}", pytrace=False)
    wrong = []
    names = attributes(found) if row.has else frozenset()
    wrong += [f"has no {name}" for name in row.has if name not in names]
    if row.takes or row.passes is not None:
        taken, any_keyword = parameters(found)
        if not any_keyword:
            wrong += [f"takes no {name}" for name in row.takes if name not in taken]
        if row.passes is not None and tuple(taken) != row.passes:
            wrong.append(f"takes {tuple(taken)}, not {row.passes}")
    if row.fields or row.all_fields is not None:
        present = dataclass_fields(found)
        wrong += [f"has no field {name}" for name in row.fields if name not in present]
        if row.all_fields is not None and set(present) != set(row.all_fields):
            differing = sorted(set(present) ^ set(row.all_fields))
            wrong.append(f"has other fields than known: {differing}")
    if row.equals is not _MISSING and value(found) != row.equals:
        wrong.append(f"is {value(found)!r}, not {row.equals!r}")
    if row.says:
        text = source_text(found)
        wrong += [f"does not say {words!r}" for words in row.says if words not in text]
    if wrong:
        pytest.fail(f"{row.target} {'; '.join(wrong)}: {row.breaks}", pytrace=False)


# Result of a search: an object, or a piece of source.


@dataclass(frozen=True)
class Source:
    """A definition in the source of a module that cannot be imported here."""

    module: str
    node: ast.AST


def find(target):
    """The object or :class:`Source` that a target names; ``_MISSING`` if there is none."""
    module, _, qualified = target.partition(":")
    names = qualified.split(".") if qualified else []
    imported = import_or_none(module)
    if imported is not None:
        found = imported
        for name in names:
            found = _attribute(found, name)
            if found is _MISSING:
                return _MISSING
        return found
    return find_in_source(module, names)


def reachable(module, name):
    """Whether a module, or a dotted name in it, is there. Names of an object that exists only at
    run time (``config.field`` of an instance) are not followed."""
    if import_or_none(module) is None and path_of(module) is None:
        # ``from package import something`` was taken for a module: look it up in its package.
        package, _, last = module.rpartition(".")
        return bool(package) and reachable(package, f"{last}.{name}" if name else last)
    if not name:
        return True
    names = name.split(".")
    # In the source as well: some names are there with CUDA, or Transformer Engine, alone.
    for found in (find(f"{module}:{name}"), find_in_source(module, names)):
        if found is not _MISSING:
            return True
    first, _, rest = name.partition(".")
    submodule = f"{module}.{first}"
    return path_of(submodule) is not None and reachable(submodule, rest)


@cache
def import_or_none(module):
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError):
        return None


@cache
def tree_of(module):
    """The parsed source of a module, found without importing it; ``None`` without source."""
    path = path_of(module)
    return None if path is None else ast.parse(path.read_text(encoding="utf-8"))


def path_of(module):
    """The file of a module. Not even its parent packages have to be importable."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        base = Path(folder, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def find_in_source(module, names):
    """Look a name up in a module's source, through the imports of that module."""
    tree = tree_of(module)
    if tree is None:
        return _MISSING
    found = Source(module, tree)
    for position, name in enumerate(names):
        node = definition(found.node, name)
        if node is None:
            # Inherited, or assigned to ``self``.
            is_class = isinstance(found.node, ast.ClassDef)
            return found if is_class and name in attributes(found) else _MISSING
        if isinstance(node, ast.ImportFrom):
            origin = _absolute(module, node)
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return find(f"{origin}:{'.'.join([original, *names[position + 1 :]])}")
        found = Source(module, node)
    return found


def definition(scope, name):
    """Node that defines a name in a module or class: also under ``if`` and ``try``."""
    for node in _statements(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return node
        elif isinstance(node, ast.ImportFrom) and any(
            (a.asname or a.name) == name for a in node.names
        ):
            return node
    return None


def _statements(scope):
    for statement in getattr(scope, "body", []):
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements(statement)
            for other in ("orelse", "handlers", "finalbody"):
                for nested in getattr(statement, other, []):
                    if isinstance(nested, ast.stmt):
                        yield nested
                    yield from _statements(nested)


def _absolute(module, node):
    if not node.level:
        return node.module or ""
    path = path_of(module)
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _attribute(owner, name):
    if isinstance(owner, Mapping) and name in owner:
        return owner[name]
    found = inspect.getattr_static(owner, name, _MISSING)
    if found is _MISSING:
        # Modules that load lazily, and enum members.
        found = getattr(owner, name, _MISSING)
    if found is _MISSING and inspect.isclass(owner) and name in attributes(owner):
        return None
    if isinstance(found, classmethod | staticmethod):
        return found.__func__
    return found


# Checks of a result.


def attributes(found):
    """Attributes of an object, module or class, with what a class assigns to ``self``; a mapping's
    keys."""
    if isinstance(found, Source):
        return _of_class_source(found)
    if isinstance(found, Mapping):
        return frozenset(found)
    if inspect.isclass(found):
        names = set(dir(found))
        for base in found.__mro__:
            names |= set(inspect.get_annotations(base))
            names |= _assigned_names(base)
        return frozenset(names)
    if inspect.ismodule(found):
        return frozenset(dir(found)) | {
            name for name in getattr(found, "__all__", []) if hasattr(found, name)
        }
    return frozenset(dir(found))


def _of_class_source(found):
    names = set(_names_of(found.node))
    for parent in _bases(found):
        names |= attributes(parent)
    return frozenset(names)


@cache
def _assigned_names(one):
    if one.__module__ == "builtins":
        return frozenset()
    try:
        text = textwrap.dedent(inspect.getsource(one))
    except (OSError, TypeError):
        return frozenset()
    return frozenset(_names_of(ast.parse(text).body[0]))


def _names_of(scope):
    """Names that a class body defines, and attributes that its methods assign to ``self``."""
    for statement in _statements(scope):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def parameters(found):
    """Names of a callable's parameters without ``self`` and ``cls``; whether any keyword goes."""
    if isinstance(found, Source):
        node = found.node
        if isinstance(node, ast.ClassDef):
            own = definition(node, "__init__")
            if own is None:
                return _inherited_parameters(found)
            node = own
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return [n for n in names if n not in ("self", "cls")], node.args.kwarg is not None
    if isinstance(found, property):
        found = found.fget
    signature = inspect.signature(found)
    kinds = inspect.Parameter
    names = [
        p.name
        for p in signature.parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
    return [n for n in names if n not in ("self", "cls")], any_keyword


def _inherited_parameters(found):
    """Parameters of a class without an ``__init__``: its first base's with one, or its fields."""
    for parent in _bases(found):
        names, any_keyword = parameters(parent)
        if names or any_keyword:
            return names, any_keyword
    return list(dataclass_fields(found)), False


def _bases(found):
    for base in getattr(found.node, "bases", []):
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            parent = find(f"{found.module}:{name.id}")
            if parent is not _MISSING:
                yield parent


def dataclass_fields(found):
    """Names of a dataclass's or a struct's fields, inherited ones included."""
    if isinstance(found, Source):
        names = []
        for parent in _bases(found):
            names += dataclass_fields(parent)
        for statement in getattr(found.node, "body", []):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and "ClassVar" not in ast.unparse(statement.annotation)
            ):
                names.append(statement.target.id)
        return tuple(dict.fromkeys(names))
    if dataclasses.is_dataclass(found):
        return tuple(one.name for one in dataclasses.fields(found))
    for key in ("__struct_fields__", "_fields"):
        if hasattr(found, key):
            return tuple(getattr(found, key))
    return ()


def value(found):
    """The value of a constant, an enum member or an assignment in source."""
    if isinstance(found, Source):
        node = getattr(found.node, "value", None)
        return _MISSING if node is None else ast.literal_eval(node)
    return found.value if isinstance(found, enum.Enum) else found


def source_text(found):
    """The source, with white space as in the file."""
    if isinstance(found, Source):
        path = path_of(found.module)
        assert path is not None
        text = path.read_text(encoding="utf-8")
        return (
            text
            if isinstance(found.node, ast.Module)
            else (ast.get_source_segment(text, found.node) or "")
        )
    return inspect.getsource(found)
