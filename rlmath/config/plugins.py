"""Import the user's code that settings name, before anything looks up what it registers."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.environments import ENVIRONMENTS, refuse
from rlmath.config.options import SECTIONS
from rlmath.config.schema import Config
from rlmath.config.settings import value_of
from rlmath.errors import ConfigError
from rlmath.plugins.loading import use
from rlmath.plugins.source import PluginError, hashes, is_file, is_path, split

# Settings that choose a part by name, or several.
CHOOSERS = (*(section.chooser for section in SECTIONS), "runner.trackers", "rollout.tools")


def import_plugins(config: Config) -> None:
    """Import what the settings name, in this process and in those that it starts, and note the
    hashes of the source files. Raises ConfigError: something is not there or cannot be imported, or
    its source has another hash than the settings say."""
    if (name := config.rollout.environment) is not None:
        refuse(name, [split(name)[0].partition(".")[0]])
    problems: list[str] = []
    for key, place in dict.fromkeys(_everywhere(config)):
        try:
            use(place)
        except PluginError as error:
            problems.append(f"{key}: {error}")
    found = {} if problems else found_hashes(config)
    for name, given in config.plugin_hashes.items():
        if name in found and found[name] != given:
            problems.append(
                f"plugin_hashes: {name} has changed: its source had the hash {given}, which is not "
                f"there; the file has {found[name]}. Put the earlier file back, or start a new run"
            )
        elif name not in found and _top(name) in map(_top, found):
            problems.append(f"plugin_hashes: {name}, of hash {given}, is not there any more")
    if problems:
        raise ConfigError.of(problems)
    config.plugin_hashes = found


def found_hashes(config: Config) -> dict[str, str]:
    """The hash of each source file that the settings name, by name."""
    places = dict.fromkeys(
        [*(place for _, place in _everywhere(config)), *_of_rewards(config), *option_places(config)]
    )
    return {name: value for place in places for name, value in hashes(place).items()}


def _everywhere(config: Config) -> Iterator[tuple[str, str]]:
    """Key and place of what each process imports."""
    for place in config.plugins:
        yield f"plugins=[{place}]", place
    for key in CHOOSERS:
        chosen = value_of(config, key)
        for name in [chosen] if isinstance(chosen, str) else chosen or ():
            place, attribute = split(name)
            if attribute:
                yield f"{key}={name}", place
    for index, item in enumerate(config.eval.benchmarks):
        place, attribute = split(item.name)
        if attribute and item.path is None:
            yield f"eval.benchmarks[{index}].name={item.name}", place


def _of_rewards(config: Config) -> Iterator[str]:
    """Places of rewards and of the providers that run their code, which the driver alone imports,
    when it makes them."""
    for item in config.reward.items:
        place, attribute = split(str(item.params.get("provider", "")))
        if attribute:
            yield place
        if is_path(item.name) and not item.name.startswith(("http://", "https://")):
            place, attribute = split(item.name)
            yield place if attribute or is_file(place) else place.rpartition(".")[0]


def option_places(config: Config) -> Iterator[str]:
    """Places that the options of the environment and the provider of Python calls name, which the
    driver alone imports."""
    name, given = config.rollout.environment, config.rollout.environment_options
    options = () if name is None else ENVIRONMENTS.traits(name).code_options
    for chosen in (*(str(given.get(one, "")) for one in options), config.rollout.python_provider):
        place, attribute = split(chosen)
        if attribute:
            yield place


def _top(name: str) -> str:
    """Package of a file in a package."""
    return name.partition("/")[0] if not name.startswith("/") else name
