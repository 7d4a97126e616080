"""The command line of ``rlmath plan``: settings as ``key=value``, and options of its own."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.config.load import CONF_DIR, load
from rlmath.config.schema import Config
from rlmath.config.settings import by_key, out_of_range, value_of
from rlmath.errors import ConfigError, UserError

# Stands for the model's path where its sizes are given one by one.
NO_PATH = "PATH"
# Options that were settings all along, with what to write; of both plans.
LAYOUT_FLAGS = {
    "--tp": "actor.tensor_parallel=N",
    "--pp": "actor.pipeline_parallel=N",
    "--ep": "actor.expert_parallel=N",
    "--engine-tp": "rollout.tensor_parallel=N",
}


@dataclass(frozen=True)
class Given:
    """The settings on the command line of a plan.

    Attributes:
        config: All settings, with their defaults.
        keys: Those that were given.
        words: As they were given.
    """

    config: Config
    keys: frozenset[str]
    words: tuple[str, ...] = ()

    def held(self, key: str) -> Any:
        """The value of a setting that was given; ``None``: the plan chooses it."""
        return value_of(self.config, key) if key in self.keys else None


def take_settings(
    arguments: Sequence[str], known: Collection[str], flags: Mapping[str, str]
) -> tuple[Given, list[str]]:
    """Split a command line into settings and the rest.

    Args:
        arguments: After the command.
        known: Settings that the plan depends on; ``cluster=OPTION`` works too.
        flags: Options that were settings all along, with what to write.

    Raises:
        UserError: A setting that the plan does not depend on, or such an option.
        ConfigError: A setting that is unknown, of the wrong type or out of range.
    """
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    rest = [word for word in arguments if word not in words]
    for word in rest:
        if word.split("=")[0] in flags:
            raise UserError(f"{word} is a setting now; give {flags[word.split('=')[0]]}")
    keys = frozenset(word.split("=")[0] for word in words)
    groups = {folder.name for folder in CONF_DIR.iterdir()} - {"cluster"}
    # What is printed or written for a run may have its other settings too.
    others: set[str] = set() if {"--command", "--write"} & set(rest) else set(by_key())
    for key in sorted(keys & (others | groups) - set(known)):
        raise UserError(
            f"{key}: this plan does not depend on it; it takes {', '.join(known)}; with --command "
            "or --write any setting"
        )
    # One node of GPUs unless it is said otherwise.
    base = ["cluster=gpu8", f"model.path={NO_PATH}", "runner.run_dir=none"]
    config = load([*base, *words])
    wrong = list(out_of_range(config))
    if wrong:
        raise ConfigError.of(wrong)
    return Given(config, keys, tuple(words)), rest


def no_model_argument(model: str | None) -> None:
    """The model was an argument of its own once.

    Raises:
        UserError: It still is.
    """
    if model is not None:
        raise UserError(f"{model}: the model is a setting; give model.path={model}")


def count(text: str) -> int:
    """A whole number from 1."""
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
