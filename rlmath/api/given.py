"""Settings for objects given in Python: the run folder then has all of it, and the command line
can continue the run.

A function that other processes can import is named (``my_pkg.losses:mine``). Any other is written
to ``RUN_DIR/given/NAME.py``, a plug-in like one of the user's files: it has the source, for people,
and the pickled object. Rows are written to ``RUN_DIR/given/data.jsonl``; an object with
``state_dict`` is read on demand instead.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import json
import keyword
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.api.source import import_path, source_hash, source_text
from rlmath.config.quoting import format_value, quoted_path
from rlmath.errors import UserError
from rlmath.monitor.files import replacing
from rlmath.plugins.registry import Registry
from rlmath.utils.setting import Options

FOLDER = "given"
# Most rows that are written to a file; more of them are probably endless, or a file already.
MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class Part:
    """A kind of part.

    Attributes:
        setting: The setting that chooses it, or has a list of them.
        decorator: Decorator of a function that is not registered; empty: the registry's own.
        several: The setting is a list, of names, of items with a name, or of ``plugins``, which are
            only imported.
    """

    setting: str
    module: str
    registry: str
    decorator: str = ""
    several: bool = False

    def names(self) -> Registry[Any, Any]:
        return getattr(importlib.import_module(self.module), self.registry)


# By the arguments of ``Run.from_config``.
PARTS = {
    "loss": Part("algorithm.loss", "rlmath.algorithms.losses", "LOSSES", "policy_loss"),
    "advantage": Part("algorithm.advantage", "rlmath.algorithms.advantages", "ADVANTAGES"),
    "aggregation": Part("algorithm.aggregation", "rlmath.algorithms.aggregation", "AGGREGATIONS"),
    "kl_estimator": Part("algorithm.kl_estimator", "rlmath.algorithms.kl", "KL_ESTIMATORS"),
    "correction": Part("algorithm.correction.kind", "rlmath.algorithms.correction", "CORRECTIONS"),
    "group_filter": Part("algorithm.filter.keep", "rlmath.algorithms.filters", "GROUP_FILTERS"),
    "curriculum": Part("algorithm.curriculum.kind", "rlmath.algorithms.curriculum", "CURRICULA"),
    "data_source": Part("data.source", "rlmath.data", "DATA_SOURCES"),
    "verifier": Part("reward.verifier", "rlmath.grading.verifiers", "VERIFIERS"),
    "transport": Part("weights.transport", "rlmath.engines.transport", "TRANSPORTS"),
    "environment": Part("rollout.environment", "rlmath.config.environments", "ENVIRONMENTS"),
    "engine_arguments": Part(
        "rollout.engine_arguments", "rlmath.config.engine_arguments", "ENGINE_ARGUMENTS"
    ),
    "trackers": Part("runner.trackers", "rlmath.monitor.trackers", "TRACKERS", several=True),
    "benchmarks": Part("eval.benchmarks", "rlmath.config.benchmarks", "BENCHMARKS", several=True),
    "tools": Part("rollout.tools", "rlmath.config.environments", "TOOLS", several=True),
    "phase_observers": Part(
        "plugins", "rlmath.monitor.phase_observers", "PHASE_OBSERVERS", several=True
    ),
    "step_checks": Part("plugins", "rlmath.training.checks.base", "STEP_CHECKS", several=True),
    "families": Part("plugins", "rlmath.model.families", "FAMILY_PLUGINS", several=True),
}
_MARK = "# source "
_LINE = 96


class Given:
    """Writes what is given to a run's folder, and gives the settings that name it."""

    def __init__(self, run_dir: str, plugins: Sequence[str] = ()) -> None:
        self._run_dir, self._folder = run_dir, Path(run_dir) / FOLDER
        self.overrides: list[str] = []
        self._plugins = [quoted_path(one) for one in plugins]
        self._before: dict[Path, bytes | None] = {}
        self._names: set[str] = set()

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the files if the settings are refused, since an earlier run may need them."""
        try:
            yield
        except BaseException:
            for path, content in self._before.items():
                if content is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(content)
            raise

    def part(self, argument: str, value: Any) -> None:
        """A loss, an estimator or another part that a registry has.

        Raises:
            UserError: It cannot be sent to other processes.
        """
        part = PARTS[argument]
        if not part.several:
            self.overrides.append(f"{part.setting}={self._place(argument, value, part)}")
            if argument == "data_source":
                self.overrides.append("data.train_paths=[]")
            return
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise UserError(f"{argument} is a {type(value).__name__}; give a list of them")
        found = [self._item(f"{argument}[{i}]", one, part) for i, one in enumerate(value)]
        if part.setting == "plugins":
            self._plugins = found = list(dict.fromkeys([*self._plugins, *found]))
            self.overrides = [one for one in self.overrides if not one.startswith("plugins=")]
        self.overrides.append(f"{part.setting}=[{', '.join(found)}]")

    def _item(self, argument: str, value: Any, part: Part) -> str:
        if part.setting == "eval.benchmarks":
            benchmark, settings = value if isinstance(value, tuple) else (value, {})
            return format_value({"name": self._name_of(argument, benchmark, part), **settings})
        if part.setting != "plugins" or isinstance(value, str):
            return self._place(argument, value, part)
        place = import_path(value)
        if place is None:
            place = self._name_of(argument, value, part)
        elif part.names().registration(value) is None:
            raise UserError(
                f"{argument}: {place} is not registered, so that importing it does nothing; "
                f"register it with @{part.registry}.register of {part.module}"
            )
        return quoted_path(place.rpartition(":")[0])

    def rewards(self, values: Sequence[Any]) -> None:
        """Rewards in place of ``reward.items``: names, functions, or pairs of one and its weight.

        Where none of them compares answers, ``math`` is added with weight 0, for the accuracy.

        Raises:
            UserError: One cannot be sent to other processes.
        """
        from rlmath.rewards.registry import any_graded

        items, names = [], []
        for index, value in enumerate(values):
            reward, weight = value if isinstance(value, tuple) else (value, 1.0)
            names.append(self._place(f"rewards[{index}]", reward, None))
            items.append(f"{{name: {names[-1]}, weight: {weight!r}}}")
        if not any_graded(name.strip('"') for name in names):
            items.append("{name: math, weight: 0}")
        self.overrides.append(f"reward.items=[{', '.join(items)}]")

    def rows(self, argument: str, key: str, rows: Iterable[Any]) -> None:
        """Problems, each a dictionary, in place of the files of ``key``.

        Raises:
            UserError: A row is no dictionary, or has a value that is no JSON; or there are no rows,
                or too many.
        """
        if key == "data.train_paths" and _has_place(rows):
            place = self._place(argument, _Copies(rows), PARTS["data_source"])
            self.overrides += [f"data.source={place}", "data.train_paths=[]"]
            return
        if isinstance(rows, str | bytes | Mapping):
            raise UserError(
                f"{argument} is a {type(rows).__name__}; give rows, each a dictionary of a "
                f"problem's fields, or files with {key}=[FILE]"
            )
        path = self._folder / f"{argument}.jsonl"
        count = 0
        with self._writing(path) as file:
            for count, row in enumerate(rows, start=1):
                if count > MOST_ROWS:
                    raise UserError(_endless(argument, key))
                file.write(_line(argument, count, row).encode())
            if not count:
                raise UserError(f"{argument} has no rows")
        self.overrides.append(f"{key}=[{quoted_path(path)}]")

    def _place(self, argument: str, value: Any, part: Part | None) -> str:
        """The value of the setting that names a part or a reward, in quotes where needed."""
        return quoted_path(self._name_of(argument, value, part))

    def _name_of(self, argument: str, value: Any, part: Part | None) -> str:
        if isinstance(value, str):
            return value
        if not callable(value):
            kind = type(value).__name__
            raise UserError(f"{argument} is a {kind}; give a function or class, or its name")
        known = None if part is None else part.names().registration(value)
        found = import_path(value)
        if found is not None:
            is_own = known is not None and found.startswith("rlmath.")
            return known[0] if known is not None and is_own else found
        name = self._free_name(value)
        path = self._folder / f"{name}.py"
        sent = value if part is None else (value, *(known or (name, Options, None))[1:])
        digest, shown = source_hash(sent), value.source if isinstance(value, _Copies) else value
        mark = f"{_MARK}{digest}\n"
        # A pickle of the same source may differ in its bytes, and a resume compares files.
        if not (path.is_file() and mark in path.read_text(encoding="utf-8")):
            lines = [
                f"# {name}, given in Python as {argument}; written by rlmath.Run. Below is its",
                "# source, and the pickled object, which is what runs.",
                f"{mark}#",
                *(f"#     {line}" for line in source_text(shown).splitlines()),
                "",
                *_unpickling(argument, name, sent),
                "",
                *(_registering(name, part, digest, known is not None) if part else ()),
            ]
            with self._writing(path) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        return f"{self._run_dir}/{FOLDER}/{name}.py:{name}"

    def _free_name(self, value: Any) -> str:
        first = getattr(value, "__name__", type(value).__name__).strip("<>")
        first += "_" * keyword.iskeyword(first)  # A lambda has no name.
        name, number = first, 2
        while name in self._names:
            name, number = f"{first}_{number}", number + 1
        self._names.add(name)
        return name

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before[path] = path.read_bytes() if path.is_file() else None
        with replacing(path) as file:
            yield file


class _Copies:
    """Makes data sources: copies of an object in the state in which it was given."""

    def __init__(self, source: Any) -> None:
        self.source, self.__name__ = source, type(source).__name__

    def __call__(self, options: Any) -> Any:
        return copy.deepcopy(self.source)


def _has_place(rows: Any) -> bool:
    """Whether rows can be read on demand, and again after a resume."""
    return all(callable(getattr(rows, name, None)) for name in ("state_dict", "load_state_dict"))


def _endless(argument: str, key: str) -> str:
    source = (
        f"; rows that are made as the run goes come from an object that also has state_dict and "
        f"load_state_dict, which a resume needs: {argument}=MyRows() (docs/extending.md)"
    )
    return (
        f"{argument} has more than {MOST_ROWS:,} rows, or no end. Larger data belongs in files, "
        f"{key}=[FILE]{source if key == 'data.train_paths' else ''}"
    )


def _line(argument: str, number: int, row: Any) -> str:
    where = f"{argument}: row {number}"
    if not isinstance(row, Mapping):
        raise UserError(
            f"{where} is a {type(row).__name__}; a row is a dictionary of a problem's fields"
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is none that JSON can have: {error}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # A NumPy value.
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")


def _unpickling(argument: str, name: str, sent: Any) -> Iterator[str]:
    """Lines of a module that has a pickled object."""
    from ray import cloudpickle

    try:
        pickled = cloudpickle.dumps(sent)
    except Exception as error:
        raise UserError(
            f"{argument}: {name} cannot be sent to other processes: {type(error).__name__}: "
            f"{error}. Define it in a file or a package that makes there what cannot be sent"
        ) from error
    yield from ("import base64", "", "from ray import cloudpickle", "", '_PICKLED = """')
    yield from textwrap.wrap(base64.b64encode(pickled).decode(), _LINE)
    yield '"""'
    names = f"{name}, _options, _traits" if isinstance(sent, tuple) else name
    yield f"{names} = cloudpickle.loads(base64.b64decode(_PICKLED))"


def _registering(name: str, part: Part, digest: str, is_registered: bool) -> Iterator[str]:
    """Lines that register it. Another run of the same process may have a part of its name."""
    decorator = f"{part.registry}.register"
    if part.decorator and not is_registered:
        decorator = part.decorator
    yield f"from {part.module} import {decorator.partition('.')[0]}"
    yield f'{name} = {decorator}("{name}_{digest}", _options, _traits)({name})'
