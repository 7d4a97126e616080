"""From overrides on the command line to a typed :class:`Config`, or one message that says why not.

Hydra composes the groups of ``conf/`` onto the schema; every unknown key, wrong type and missing
value is refused here, all of them in one message. Ranges and combinations are the business of
``checks.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from rlmath.config.groups import CONF_DIR, options
from rlmath.config.options import SECTIONS, complete, is_open
from rlmath.config.placeholders import REFERENCE, unfilled_part, unknown_reference
from rlmath.config.plugins import import_plugins
from rlmath.config.quoting import path_override, quoted_path, read_typed
from rlmath.config.removed import removed_setting, removed_value
from rlmath.config.schema import Config
from rlmath.config.secrets import without_secrets
from rlmath.config.settings import by_key, sections, value_of
from rlmath.errors import ConfigError
from rlmath.utils.close_names import did_you_mean


@dataclass(frozen=True)
class Composed:
    """Settings, and where they come from."""

    config: Config
    # The option of each group, such as {"recipe": "dapo"}; None: none.
    choices: Mapping[str, str | None]
    given: frozenset[str]  # Keys on the command line: settings, sections and groups.
    folders: tuple[Path, ...]  # Folders of groups, the project's own first.

    def file_of(self, group: str) -> Path | None:
        """The file of a group's chosen option; ``None``: none is chosen."""
        return self._file(group, self.choices.get(group))

    def _file(self, group: str, name: str | None) -> Path | None:
        files = (folder / group / f"{name}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)

    def origin(self, key: str) -> str:
        """Where a setting's value comes from, in words."""
        if any(key == one or key.startswith(one + ".") for one in self.given):
            return "the command line"
        # As in conf/config.yaml, later ones win.
        for group in reversed(_ORDER):
            name = self.choices.get(group)
            if name and any(key in keys for keys in self._keys_of(group, name)):
                return f"{group} {name}"
        return "the default"

    def _keys_of(self, group: str, name: str) -> Iterator[set[str]]:
        """Settings of a file of a group, and of the files of this group that it builds on."""
        file = self._file(group, name)
        if file is None:
            return
        content = OmegaConf.load(file)
        assert isinstance(content, DictConfig)
        is_global = "@package _global_" in file.read_text(encoding="utf-8")
        for base in content.pop("defaults", None) or []:
            if isinstance(base, str) and base != "_self_":
                yield from self._keys_of(group, base)
        yield _leaves(OmegaConf.to_container(content), "" if is_global else group)


_ORDER = (
    "data", "actor", "rollout", "model", "reward", "algorithm", "recipe", "cluster", "runner",
    "experiment",
)  # fmt: skip


def _leaves(content: Any, prefix: str) -> set[str]:
    if not isinstance(content, dict):
        return {prefix}
    found = (_leaves(inner, f"{prefix}.{key}".strip(".")) for key, inner in content.items())
    return set().union(*found)


def load(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Config:
    return compose_settings(overrides, config_dir).config


def compose_settings(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> Composed:
    """Compose, resolve and type the settings. Returns the settings, as the schema's dataclasses,
    with every ``${...}`` resolved, and the options that were chosen. Raises ConfigError: names
    every override that cannot be applied, and what would work instead.

    Args:
        overrides: Hydra overrides: ``experiment=quickstart``, ``actor.tensor_parallel=2``.
        config_dir: A folder with further options of the groups, such as
            ``experiment/mine.yaml``; rlmath's own come first where both have one of a name.
    """
    given_dir = None if config_dir is None else Path(config_dir).expanduser()
    folders = [CONF_DIR] + ([given_dir.resolve()] if given_dir is not None else [])
    if not folders[-1].is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    overrides = [_readable(text) for text in overrides]
    problems = _problems_of_overrides(overrides, folders)
    if problems:
        raise ConfigError.of(problems)
    composed, choices = _compose(overrides, folders[1:])
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError.of(_missing_messages(missing, overrides, folders))
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_file_error(error)) from error
    assert isinstance(config, Config)
    literal = [f"{key}={value}: {_NO_REFERENCE}" for key, value in _with_reference(config)]
    if literal:
        raise ConfigError.of(literal)
    _expand_home(config)
    _drop_options_of_others(config, overrides, folders[1:])
    import_plugins(config)
    complete(config)
    given = frozenset(_parse_override(text).key_or_group for text in overrides)
    return Composed(config, choices, given, tuple(folders))


def with_values(saved: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Settings that :func:`save` wrote, as the schema's dataclasses, with other values of some.
    ``overrides``: ``key=value`` of settings; of groups there is nothing left in saved settings.
    Raises ConfigError: an override cannot be applied, or the settings are of another version."""
    overrides = [_readable(text) for text in overrides]
    problems = _problems_of_overrides(overrides, [CONF_DIR])
    parsed = [] if problems else [_parse_override(text) for text in overrides]
    problems += [
        f"{one.input_line}: saved settings are changed one by one, by key=value of a setting"
        for one in parsed
        if not _is_value(one)
    ]
    if problems:
        raise ConfigError.of(problems)
    schema = _schema()
    try:
        merged = OmegaConf.merge(schema, saved)
        for section in SECTIONS:
            # Options of another loss are not those of the one that is chosen now.
            chosen = [one.value() for one in parsed if one.key_or_group == section.chooser]
            if chosen and chosen[-1] != value_of(merged, section.chooser):
                OmegaConf.update(merged, section.key, {}, merge=False)
        for one in parsed:
            addable = is_open(one.key_or_group)
            value = read_typed(one.key_or_group, one.value())
            OmegaConf.update(merged, one.key_or_group, value, force_add=addable)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        message = _one_line(str(error))
        raise ConfigError(f"the saved settings are of another version: {message}") from error
    assert isinstance(config, Config)
    _expand_home(config)
    import_plugins(config)
    complete(config)
    return config


def to_plain(config: Config) -> Any:
    """The resolved settings as nested dictionaries of what YAML has, without secrets."""
    return without_secrets(_plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.name if isinstance(value, Enum) else value


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def save(config: Config, path: str | Path) -> None:
    """Write the resolved settings to ``path``; its folder is made if missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(to_yaml(config), encoding="utf-8")
    aside.replace(path)


def _with_reference(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Resolved texts with ``${``, by key; saved settings would be read as having references."""
    if dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _with_reference(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _with_reference(inner, f"{key}[{index}]")
    elif isinstance(value, str) and REFERENCE in value:
        yield key, without_secrets(value, key.rpartition(".")[2])


def _drop_options_of_others(
    config: Config, overrides: Sequence[str], more_folders: Sequence[Path]
) -> None:
    """Where the command line chooses another loss than the files, their options are not its."""
    parsed = {text: _parse_override(text) for text in overrides}
    for section in SECTIONS:
        others = [text for text, one in parsed.items() if one.key_or_group != section.chooser]
        if len(others) == len(overrides):
            continue
        before = value_of(_compose(others, more_folders)[0], section.chooser)
        if before == value_of(config, section.chooser):
            continue
        given: set[str] = set()
        for one in parsed.values():
            if one.key_or_group.startswith(section.key + "."):
                given.add(one.key_or_group.removeprefix(section.key + "."))
            elif one.key_or_group == section.key:
                given |= set(one.value())  # type: ignore[arg-type]
        options = value_of(config, section.key)
        for name in set(options) - given:
            del options[name]


def _schema() -> DictConfig:
    """The schema's defaults, the caller's to change."""
    return pickle.loads(_pickled_schema())


@functools.cache
def _pickled_schema() -> bytes:
    """Building them takes most of a tenth of a second, and a deep copy five times an unpickling."""
    return pickle.dumps(OmegaConf.structured(Config))


@functools.cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)


def _compose(
    overrides: Sequence[str], more_folders: Sequence[Path]
) -> tuple[DictConfig, dict[str, str | None]]:
    """The settings, and the chosen option of each group.

    Files first, then the values that are given, which is Hydra's order too.
    """
    values = [one for one in map(_parse_override, overrides) if _is_value(one)]
    files = [text for text in overrides if not _is_value(_parse_override(text))]
    try:
        if more_folders:
            composed, choices = _compose_files(files, more_folders)
        else:
            composed, choices = pickle.loads(_compose_own_files(tuple(files)))
        for override in values:
            key = override.key_or_group
            # An option of a loss or an estimator is not in the schema.
            addable = is_open(key)
            OmegaConf.update(composed, key, read_typed(key, override.value()), force_add=addable)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_file_error(error)) from error
    except YAMLError as error:
        raise ConfigError(f"a settings file is not YAML: {_one_line(str(error))}") from error
    return composed, choices


def _readable(text: str) -> str:
    """A text or a list of texts as a shell user types it, as an override that Hydra can read.

    Hydra's grammar reserves ``~``, ``=``, braces, brackets and letters outside ASCII. What it can
    read is left alone, and so are references (``${...}``) and parts that were not filled in, whose
    messages say more.
    """
    key, _, value = text.partition("=")
    setting = by_key().get(key)
    if setting is None or not value or REFERENCE in value or setting.type not in _TEXTS:
        return text
    try:
        if not _parse_override(text).is_sweep_override():
            return text
    except OverrideParseException:
        pass
    if _IS_PATH.search(key) and unfilled_part(value) and not Path(value).exists():
        return text
    if setting.type is str:
        return path_override(key, value)
    inner = value.removeprefix("[").removesuffix("]")
    if len(value) - len(inner) != 2 or any(quote in inner for quote in "\"'"):
        return text
    return f"{key}=[{','.join(quoted_path(item.strip()) for item in inner.split(','))}]"


def _expand_home(section: Any) -> None:
    """Replace a leading ``~`` in the paths of resolved settings, as a shell would."""
    for field in dataclasses.fields(section):
        value, is_path = getattr(section, field.name), _IS_PATH.search(field.name)
        if dataclasses.is_dataclass(value):
            _expand_home(value)
        elif is_path and isinstance(value, str):
            setattr(section, field.name, os.path.expanduser(value))
        elif isinstance(value, list):
            for item in value:
                if dataclasses.is_dataclass(item):
                    _expand_home(item)
            if is_path and all(isinstance(item, str) for item in value):
                value[:] = map(os.path.expanduser, value)


def value_of_override(text: str) -> Any:
    """The value in an override that has been checked, as settings get it."""
    override = _parse_override(text)
    return read_typed(override.key_or_group, override.value())


@functools.lru_cache(maxsize=1024)
def _parse_override(text: str) -> Override:
    """One override, which nothing changes: ``value()`` makes new lists and dictionaries."""
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def _is_value(override: Override) -> bool:
    """``key=value`` of a setting. A file's name, ``+key`` and ``key@package`` are for Hydra."""
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None
    return plain and (key in by_key() or is_open(key))


@functools.cache
def _compose_own_files(overrides: tuple[str, ...]) -> bytes:
    """:func:`_compose_files` of rlmath's own, pickled. They stay as they are, and composing them
    takes a quarter of a second."""
    return pickle.dumps(_compose_files(overrides, ()))


def _compose_files(
    overrides: Sequence[str], more_folders: Sequence[Path]
) -> tuple[DictConfig, dict[str, str | None]]:
    _register_schema()
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in more_folders)}]"]
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        composed = compose(
            "config",
            overrides=[*overrides, *(search if more_folders else [])],
            return_hydra_config=True,
        )
    choices = dict(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    return composed, {name: value for name, value in choices.items() if "/" not in name}


def _file_error(error: Exception) -> str:
    """A message for an error in a file of the groups, which Hydra reports only as text.

    It reads ``In 'experiment/mine': ConfigKeyError raised while composing config:``, the reason,
    and ``full_key: actor.x``; the first of these only while files are composed, the last only when
    it is about one key.
    """
    text = str(error)
    file = re.match(r"In '([^']+)': (?:\w+ raised while composing config:)?", text)
    named = re.search(r"^\s*full_key: (\S+)", text, re.MULTILINE)
    reason = text[file.end() if file else 0 :].split("\n    full_key")[0]
    key = named.group(1) if named else ""
    message = f"{file.group(1)}.yaml: " if file else ""
    if file and reason.strip() == f"Key '{file.group(1).split('/')[0]}' not in 'Config'":
        return f"{message}its first line has to be '# @package _global_', as its keys are settings"
    message += f"{key}: {_one_line(reason)}" if key else _one_line(reason)
    if isinstance(error, InterpolationResolutionError) or not key:
        return message
    setting = by_key().get(key)
    return f"{message}; expected {setting.type_text}" if setting else message + _did_you_mean(key)


_NO_REFERENCE = (
    "a value cannot contain ${, which refers to another setting (as ${data.seed} does); rename the "
    "file or folder, or link to it"
)
# Settings whose values are paths; a template may well hold braces.
_IS_PATH = re.compile(r"(path|paths|dir|checkpoint|resume|init_from|plugins)$")
_TEXTS = (str, list[str])


def _problems_of_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    problems = []
    # Built when a value's type has to be checked: a wrong name is reported without it.
    schema = functools.cache(_schema)
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    known = {*by_key(), *sections()}
    for text in overrides:
        key, _, value = text.partition("=")
        if unknown := unknown_reference(value, known):
            problems.append(f"{text}: {unknown} refers to no setting; {_NO_REFERENCE}")
            continue
        try:
            override = _parse_override(text)
        except OverrideParseException:
            left = unfilled_part(value) if _IS_PATH.search(key) else None
            if left is not None:
                problems.append(f"{text}: {left} was not filled in; write what it stands for")
                continue
            problems.append(
                f"{text}: not an override that can be read; write {_suggest_quoting(key, value)}"
            )
            continue
        problem = _problem_of_override(override, schema, groups, folders)
        if problem:
            problems.append(problem)
    return problems


def _suggest_quoting(key: str, value: str) -> str:
    """How to write an override that cannot be read, quoted for Hydra and for the shell."""
    setting = by_key().get(key)
    if setting is None or not value:
        return "key=value, such as actor.tensor_parallel=2"
    if setting.type in _TEXTS:
        items = value.strip("[]").split(",") if setting.type is not str else [value]
        quoted = [quoted_path(item.strip().strip("\"'")) for item in items]
        return shlex.quote(
            f"{key}={quoted[0]}" if setting.type is str else f"{key}=[{','.join(quoted)}]"
        )
    return f"{key}=VALUE with {setting.type_text}"


def _problem_of_override(
    override: Override, schema: Callable[[], DictConfig], groups: set[str], folders: Sequence[Path]
) -> str | None:
    key, text = override.key_or_group, override.input_line or ""
    value_given = text.partition("=")[2]
    if override.is_delete():
        return f"{text}: a setting cannot be deleted; set it to another value"
    if override.is_sweep_override():
        return f"{text}: one value only; a list is written {key}=[{value_given}]"
    value = override.value()
    if key in groups and not isinstance(value, dict):
        names = sorted({file.stem for folder in folders for file in (folder / key).glob("*.yaml")})
        if value is None or value in names:
            return None
        if key == "algorithm" and value in options("recipe", folders[-1]):
            return (
                f"{text}: {value} also sets the optimizer and the rewards, so it is a recipe now; "
                f"use recipe={value}"
            )
        hint = did_you_mean(str(value), names, most=3)
        return f"{text}: no such {key}; there are {', '.join(names)}{hint}"
    if key in sections():
        if not isinstance(value, dict):
            inside = [name for name in by_key() if name.startswith(key + ".") and "[]" not in name]
            return f"{text}: {key} is a section; set one of {', '.join(inside)}"
    elif is_open(key) and key not in by_key():
        return None  # Which options there are depends on what the files choose.
    elif key not in by_key():
        return f"{text}: there is no setting {key}{_did_you_mean(key)}"
    return _type_problem(text, key, value, schema())


def _type_problem(text: str, key: str, value: Any, schema: DictConfig) -> str | None:
    try:
        OmegaConf.update(schema, key, value, merge=True)
    except OmegaConfBaseException as error:
        if removed := removed_value(key, str(value)):
            return text + removed
        setting = by_key().get(key)
        expected = f"; expected {setting.type_text}" if setting else ""
        if setting and setting.type_text.startswith("list of text") and not isinstance(value, dict):
            expected += ": " + shlex.quote(f"{key}=[{quoted_path(value)}]")
        detail = (
            ""
            if setting and not isinstance(value, list | dict)
            else f" ({str(error.msg or error).splitlines()[0]})"
        )
        return f"{text}: wrong type{expected}{detail}"
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _missing_messages(
    missing: list[str], overrides: Sequence[str], folders: list[Path]
) -> list[str]:
    lines = [
        f"{key} has to be given ({by_key()[key].doc.split('. ')[0].rstrip('.')})"
        if key in by_key()
        else f"{key} has to be given"
        for key in missing
    ]
    if not any(text.startswith("experiment=") for text in overrides):
        names = ", ".join(options("experiment", folders[-1]))
        hint = f"; or choose an experiment that gives it, experiment=NAME of {names}"
        lines = [line + hint for line in lines[:1]] + lines[1:]
    return lines


def _did_you_mean(key: str) -> str:
    if removed := removed_setting(key):
        return removed
    keys = [name for name in by_key() if "[]" not in name]
    last = key.rsplit(".", 1)[-1]
    same_name = [name for name in keys if name.rsplit(".", 1)[-1] == last]
    if same_name:
        return f"; did you mean {' or '.join(same_name)}?"
    return did_you_mean(key, keys, most=3)
