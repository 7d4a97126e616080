"""Settings as ``key=value`` on the command line of a command that takes a few of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.config.groups import CONF_DIR
from rlmath.config.load import load
from rlmath.config.quoting import override
from rlmath.config.schema import Config
from rlmath.config.settings import by_key, out_of_range, replace_values, value_of
from rlmath.errors import ConfigError, UserError

# Stands for a model that is not given.
NO_PATH = "PATH"
_SETTING = re.compile(r"[+~]*[a-z_.][a-z0-9_.]*=", re.ASCII)


@dataclass(frozen=True)
class Given:
    config: Config
    keys: frozenset[str]
    words: tuple[str, ...] = ()

    def get(self, key: str) -> Any:
        """The value of a setting that was given; ``None``: the command chooses it."""
        return value_of(self.config, key) if key in self.keys else None

    def replace(self, values: Mapping[str, Any]) -> Given:
        """The same with other values, as if they had been given; ``None``: one that was not."""
        given = {key: value for key, value in values.items() if value is not None}
        words = [word for word in self.words if word.partition("=")[0] not in values]
        return Given(
            replace_values(self.config, given),
            self.keys - values.keys() | given.keys(),
            (*words, *(override(key, value) for key, value in given.items())),
        )


def take_settings(
    arguments: Sequence[str],
    known: Collection[str],
    base: Sequence[str] = (),
    any_with: Collection[str] = (),
) -> tuple[Given, list[str]]:
    """Split a command line into settings and the rest. ``any_with``: options with which the command
    takes any setting. Raises UserError: a setting that the command does not use; ConfigError: a
    setting that is unknown, of the wrong type or out of range."""
    words = [word for word in arguments if _SETTING.match(word)]
    rest = [word for word in arguments if word not in words]
    keys = frozenset(word.split("=")[0] for word in words)
    takes_any = set(any_with) & {word.split("=")[0] for word in rest}
    groups = {folder.name for folder in CONF_DIR.iterdir()}
    others: set[str] = set() if takes_any else groups | set(by_key())
    for key in sorted(keys & others - set(known)):
        more = f"; with {' or '.join(any_with)} any setting" if any_with else ""
        raise UserError(f"{key}: this command does not use it; it takes {', '.join(known)}{more}")
    config = load([f"model.path={NO_PATH}", "runner.run_dir=none", *base, *words])
    wrong = list(out_of_range(config))
    if wrong:
        raise ConfigError.of(wrong)
    return Given(config, keys, tuple(words)), rest


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: has to be at least 1")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: has to be more than 0")
    return value


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: has to be more than 0 and at most 1")
    return value
