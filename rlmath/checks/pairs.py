"""Settings that do not work with each other, as they are declared (``NotWith``), and settings that
nothing would use (``OnlyWith``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmath.config.schema import Config, Device
from rlmath.config.settings import by_key, value_of, value_text

_DEVICE = "cluster.device"
# Sections that a command does not use.
_UNUSED = {
    "train": (),
    "sft": ("rollout.", "algorithm.", "cluster.placement", "runner.profile."),
    "evaluate": ("actor.", "algorithm.", "runner.profile."),
}


def pair_problems(config: Config, device: Device, command: str) -> Iterator[str]:
    """A message for each pair of values that does not work."""
    for key, setting in by_key().items():
        for rule in setting.not_with:
            with_key, _, wanted = rule.other.partition("=")
            if key.startswith(_UNUSED[command]) or with_key.startswith(_UNUSED[command]):
                continue
            value = value_text(value_of(config, key))
            other = value_text(device if with_key == _DEVICE else value_of(config, with_key))
            applies = value == rule.value if rule.value else value != setting.default_text
            if applies and other == wanted:
                yield f"{key}={value} with {rule.other}: {rule.why}; {rule.fix}"


def unused_keys(config: Config) -> Iterator[str]:
    """Keys of settings that were changed and that nothing uses."""
    for key, setting in by_key().items():
        rule = setting.only_with
        if rule is None or value_of(config, key) == setting.default:
            continue
        chosen = value_of(config, rule.setting)
        if rule.choices:
            used = any(one in rule.choices for one in _listed(chosen))
        else:
            used = chosen != by_key()[rule.setting].default
        if not used and not (rule.also and value_of(config, rule.also) is not None):
            yield key


def unused_problems(config: Config) -> Iterator[str]:
    for key in unused_keys(config):
        setting = by_key()[key]
        rule = setting.only_with
        assert rule is not None
        value, chosen = value_of(config, key), value_of(config, rule.setting)
        default = value_text(setting.default)
        if rule.choices:
            name = rule.setting.removeprefix("algorithm.")
            choices = " or ".join(value_text(choice) for choice in rule.choices)
            yield (
                f"{key}={value_text(value)}: {rule.setting}={value_text(chosen)} does not read it; "
                f"leave it at {default}, or use {name}="
                f"{f'[{choices}]' if isinstance(chosen, list) else choices}"
            )
        else:
            yield (
                f"{key}={value_text(value)}: does nothing while {rule.setting}="
                f"{value_text(chosen)}; make that {rule.words}, or leave this at {default}"
            )


def _listed(chosen: Any) -> Any:
    return chosen if isinstance(chosen, list) else [chosen]
