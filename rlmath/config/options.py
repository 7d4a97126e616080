"""Options of the parts that are chosen by name: ``algorithm.loss_options.clip_high=0.28``.

They are declared beside the part that takes them, with ``setting(...)``, and only those of the
chosen one can be given. After loading, a section holds all of them, defaults included.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.correction import CORRECTIONS
from rlmath.algorithms.curriculum import CURRICULA
from rlmath.algorithms.filters import GROUP_FILTERS
from rlmath.algorithms.kl import KL_ESTIMATORS
from rlmath.algorithms.losses import LOSSES
from rlmath.config.benchmarks import BENCHMARKS
from rlmath.config.data_sources import DATA_SOURCES
from rlmath.config.engine_arguments import ENGINE_ARGUMENTS
from rlmath.config.environments import ENVIRONMENTS
from rlmath.config.schema import Config
from rlmath.config.settings import Setting, settings_of, value_of
from rlmath.config.transports import TRANSPORTS
from rlmath.errors import ConfigError
from rlmath.grading.verifiers import VERIFIERS
from rlmath.plugins.registry import Registry
from rlmath.utils.close_names import did_you_mean
from rlmath.utils.setting import Options


@dataclass(frozen=True)
class OptionsSection:
    """A section of options and the choice that they belong to."""

    key: str
    chooser: str
    registry: Registry[Any, Any]

    def options(self, name: str, given: Mapping[str, Any]) -> Options:
        """The options of ``name``, typed; those that are not given have their defaults. Raises
        ConfigError: one line for each option that it does not have or that has a wrong type, or for
        numbers that do not fit together."""
        kind = self.registry.options(name)
        known = {one.key.rpartition(".")[2]: one for one in self.settings(name)}
        problems = []
        typed = OmegaConf.structured(kind)
        OmegaConf.set_readonly(typed, False)
        for option, value in given.items():
            key = f"{self.key}.{option}={value}"
            if option not in known:
                names = f"has {', '.join(known)}" if known else "has no options"
                hint = did_you_mean(option, known)
                chooser = self.chooser.rpartition(".")[2]
                problems.append(f"{key}: {chooser}={name} has no such option; it {names}{hint}")
                continue
            try:
                typed[option] = value
            except OmegaConfBaseException:
                problems.append(f"{key}: wrong type; expected {known[option].type_text}")
        if problems:
            raise ConfigError.of(problems)
        try:
            made = OmegaConf.to_object(typed)
        except ValueError as error:
            raise ConfigError(f"{self.key}: {error}") from error
        assert isinstance(made, Options)
        return made

    def of(self, config: Config) -> Options:
        """The options of a loaded configuration, whose types are checked: each step reads them."""
        # By attributes, which `rlmath test` sees: value_of looks at settings that nobody uses.
        whole: Any = config
        given = functools.reduce(getattr, self.key.split("."), whole)
        return self.registry.options(value_of(config, self.chooser)).of(given)

    def of_chosen(self, config: Config) -> Options | None:
        """:meth:`of`; ``None``: none is chosen."""
        return None if value_of(config, self.chooser) is None else self.of(config)

    def settings(self, name: str) -> tuple[Setting, ...]:
        return tuple(settings_of(self.registry.options(name), self.key + "."))

    def options_by_names(self) -> Iterator[tuple[list[str], tuple[Setting, ...]]]:
        """Names that share their options, and these; names without options are left out."""
        shared: dict[type[Options], list[str]] = {}
        for name in self.registry.names():
            shared.setdefault(self.registry.options(name), []).append(name)
        for names in shared.values():
            found = self.settings(names[0])
            if found:
                yield names, found


LOSS_OPTIONS = OptionsSection("algorithm.loss_options", "algorithm.loss", LOSSES)
ADVANTAGE_OPTIONS = OptionsSection("algorithm.advantage_options", "algorithm.advantage", ADVANTAGES)
FILTER_OPTIONS = OptionsSection("algorithm.filter.options", "algorithm.filter.keep", GROUP_FILTERS)
CORRECTION_OPTIONS = OptionsSection(
    "algorithm.correction.options", "algorithm.correction.kind", CORRECTIONS
)
CURRICULUM_OPTIONS = OptionsSection(
    "algorithm.curriculum.options", "algorithm.curriculum.kind", CURRICULA
)
AGGREGATION_OPTIONS = OptionsSection(
    "algorithm.aggregation_options", "algorithm.aggregation", AGGREGATIONS
)
KL_OPTIONS = OptionsSection("algorithm.kl_options", "algorithm.kl_estimator", KL_ESTIMATORS)
VERIFIER_OPTIONS = OptionsSection("reward.verifier_options", "reward.verifier", VERIFIERS)
SOURCE_OPTIONS = OptionsSection("data.source_options", "data.source", DATA_SOURCES)
ENGINE_OPTIONS = OptionsSection(
    "rollout.engine_options", "rollout.engine_arguments", ENGINE_ARGUMENTS
)
ENVIRONMENT_OPTIONS = OptionsSection(
    "rollout.environment_options", "rollout.environment", ENVIRONMENTS
)
TRANSPORT_OPTIONS = OptionsSection("weights.transport_options", "weights.transport", TRANSPORTS)
SECTIONS = (
    LOSS_OPTIONS,
    ADVANTAGE_OPTIONS,
    FILTER_OPTIONS,
    CORRECTION_OPTIONS,
    CURRICULUM_OPTIONS,
    AGGREGATION_OPTIONS,
    KL_OPTIONS,
    VERIFIER_OPTIONS,
    SOURCE_OPTIONS,
    ENGINE_OPTIONS,
    ENVIRONMENT_OPTIONS,
    TRANSPORT_OPTIONS,
)


def benchmark_options(index: int | None = None) -> OptionsSection:
    """The options of an item of ``eval.benchmarks``; ``None``: of any, for people."""
    item = f"eval.benchmarks[{'' if index is None else index}]"
    return OptionsSection(f"{item}.options", f"{item}.name", BENCHMARKS)


def section_of(key: str) -> OptionsSection | None:
    """The section that ``algorithm.loss_options.clip_high`` is in, or that is called so itself."""
    return next((one for one in SECTIONS if f"{key}.".startswith(one.key + ".")), None)


def is_open(key: str) -> bool:
    """Whether a key is in a section whose keys the schema does not list."""
    free = ("data.template_options.", "rollout.python_provider_settings.")
    return section_of(key) is not None or f"{key}.".startswith(free)


def complete(config: Config) -> None:
    """Fill in the options that are not given, and write all as they stand in YAML.

    A name that is not registered is left to the checks. Raises ConfigError: see
    :meth:`OptionsSection.options`.
    """
    problems = []
    for section in SECTIONS:
        chosen = value_of(config, section.chooser)
        if chosen is None or not section.registry.has(chosen):
            if chosen in (None, "auto") and value_of(config, section.key):
                none = chosen or "null"
                problems.append(f"{section.key}: are those of {section.chooser}, which is {none}")
            continue
        try:
            options = section.options(chosen, value_of(config, section.key))
        except ConfigError as error:
            problems.append(str(error))
            continue
        parent, _, field = section.key.rpartition(".")
        setattr(value_of(config, parent), field, options.plain())
    for index, item in enumerate(config.eval.benchmarks):
        section = benchmark_options(index)
        try:
            if item.path is None and BENCHMARKS.has(item.name):
                item.options = section.options(item.name, item.options).plain()
            elif item.options:
                problems.append(f"{section.key}: {item.name} is no benchmark of a plug-in")
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
