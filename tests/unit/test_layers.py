"""The layers of the package: imports go down only and in no cycle, also those inside functions, and
one folder alone imports vLLM."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
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
    "weights",
    "engines",
    "vllm_plugin",
    "environments",
    "checks",
    "rollout",
    "actor",
    "validation",
    "evaluation",
    "training",
    "quickstart",
    "api",
    "commands",
    "cli",
    "__main__",
)
FILES_OF_THE_ROOT = {"__init__.py", "__main__.py", "cli.py", "errors.py", "types.py"}


@functools.cache
def modules():
    """Each module of the package."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("rlmath", *file.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = Module(file.read_text(encoding="utf-8"))
    return found


class Module:
    """Nodes of a module's syntax tree, walked once for all tests."""

    def __init__(self, source):
        self.nodes = list(ast.walk(ast.parse(source)))


def imports_of(module):
    """Every ``rlmath.FOLDER`` that a module imports, also inside functions and for types only."""
    for node in module.nodes:
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


def test_files_of_the_root():
    assert {file.name for file in PACKAGE.glob("*.py")} == FILES_OF_THE_ROOT


def test_every_folder_has_a_layer():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {name.removesuffix(".py") for name in FILES_OF_THE_ROOT} - {"__init__"}
    assert folders | files == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down(layer):
    below = {f"rlmath.{name}" for name in LAYERS[: LAYERS.index(layer) + 1]}
    upward = [
        f"{name} imports {target}"
        for name, module in modules().items()
        if name.split(".")[1:2] == [layer]
        for target in sorted({*imports_of(module)} - below)
    ]
    assert upward == []


def run_time_imports(module):
    """Module and name of each import, also inside functions, but not those for types alone."""
    for_types = {
        id(inside)
        for node in module.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inside in ast.walk(statement)
    }
    for node in module.nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def import_cycle(modules):
    """Modules of a circle of imports; none if there is no circle."""
    needs = {}
    for name, module in modules.items():
        found = {
            f"{path}.{one}" if f"{path}.{one}" in modules else path
            for path, one in run_time_imports(module)
        }
        needs[name] = (found & modules.keys()) - {name}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle():
    assert import_cycle(modules()) == []


def test_a_circle_through_a_function_is_found():
    there = "def f():\n    from b import g\n"
    for_types = "if TYPE_CHECKING:\n    from a import f\n"
    assert import_cycle({"a": Module(there), "b": Module(for_types)}) == []
    assert set(import_cycle({"a": Module(there), "b": Module("import a")})) == {"a", "b"}


def test_only_engines_import_vllm():
    """An import by a name in a text has no other use than to see whether the package is
    installed."""
    users = {
        name.split(".")[1]
        for name, module in modules().items()
        for path, _ in run_time_imports(module)
        if path.partition(".")[0] == "vllm"
    }
    assert users == {"engines"}
    named = {
        name.split(".")[1]
        for name, module in modules().items()
        for node in module.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("import_module", "__import__"))
        and "vllm" in ast.unparse(node)
    }
    assert named == {"engines"}


# A step goes through these.
MAIN_PATH = {
    *("training", "rollout", "engines", "actor", "weights"),
    *("algorithms", "batching", "checkpoint"),
}
MOST_LINES, MOST_ARGUMENTS = 60, 8
# Megatron and Triton set them.
MORE_ARGUMENTS = {"__init__", "_statistics", "_gradient", "_fingerprint"}


@pytest.mark.parametrize("name", ["group", "worker"])
def test_classes_of_ranks_have_few_public_methods(name):
    (of_ranks,) = (
        node
        for node in modules()[f"rlmath.actor.{name}"].nodes
        if isinstance(node, ast.ClassDef) and node.name in ("ActorGroup", "ActorWorker")
    )
    methods = [one.name for one in of_ranks.body if isinstance(one, ast.FunctionDef)]
    assert sum(not name.startswith("_") for name in methods) <= 25


def test_functions_of_the_main_path_fit_a_screen():
    long = []
    for name, module in modules().items():
        if name.split(".")[1:2] == [] or name.split(".")[1] not in MAIN_PATH:
            continue
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(given) - (given[:1] != [] and given[0].arg in ("self", "cls"))
            lines = (node.end_lineno or 0) - node.lineno + 1
            many = count > MOST_ARGUMENTS and node.name not in MORE_ARGUMENTS
            if lines > MOST_LINES or many:
                long.append(f"{name}.{node.name}: {lines} lines, {count} arguments")
    assert long == []
