"""The names that the code imports from the libraries it is built on, read from its source."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlmath", "ray_utils", "toolkits")
LIBRARIES = ("vllm", "megatron", "ray", "transformers")


def imported_names(libraries=LIBRARIES):
    """Places that import or reach each name of a library, inside functions as well.

    Returns:
        Files by module and name; the name is empty where the module itself is imported. Names that
        are reached through an imported module (``ray.util.get_node_ip_address``) count too.
    """
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            # Parsing each file takes seconds, and most have none of them.
            if not re.search(rf"\b(import|from) ({'|'.join(libraries)})\b", text):
                continue
            where = path.relative_to(ROOT).as_posix()
            for key in _of_tree(ast.parse(text), libraries):
                found.setdefault(key, set()).add(where)
    return {key: sorted(files) for key, files in sorted(found.items())}


def _of_tree(tree, libraries):
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.partition(".")[0] not in libraries:
                continue
            for alias in node.names:
                yield module, alias.name
                # May be a module or anything else; names reached through it are looked up alike.
                aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                if top in libraries:
                    yield alias.name, ""
                    aliases[alias.asname or top] = alias.name if alias.asname else top
    outer = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in outer:
            continue
        names = []
        inner = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in aliases:
            yield aliases[inner.id], ".".join(reversed(names))
