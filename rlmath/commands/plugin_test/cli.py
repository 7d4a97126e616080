"""``rlmath test plugin FILE|PACKAGE``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.api.given import PARTS
from rlmath.commands.plugin_test.advantages import check_advantage
from rlmath.commands.plugin_test.corrections import check_correction
from rlmath.commands.plugin_test.curricula import check_curriculum
from rlmath.commands.plugin_test.engines import (
    check_engine_arguments,
    check_family,
    check_transport,
)
from rlmath.commands.plugin_test.environments import check_environment
from rlmath.commands.plugin_test.filters import check_filter
from rlmath.commands.plugin_test.finding import Finding
from rlmath.commands.plugin_test.in_run import check_in_run
from rlmath.commands.plugin_test.losses import check_loss
from rlmath.commands.plugin_test.observers import check_phase_observer, check_step_check
from rlmath.commands.plugin_test.ranks import check_ranks, update_with
from rlmath.commands.plugin_test.rows import (
    check_benchmark,
    check_data_source,
    check_reward,
    check_verifier,
)
from rlmath.commands.plugin_test.trackers import check_tracker
from rlmath.commands.plugin_test.weights_and_kl import check_aggregation, check_kl_estimator
from rlmath.errors import UserError
from rlmath.plugins import PluginError, Registry
from rlmath.plugins.loading import public_functions, use


@dataclass(frozen=True)
class Kind:
    argument: str  # In ``rlmath.api.given.PARTS``.
    check: Callable[[str], Iterator[Finding]]
    name: str = ""  # Empty: as the argument.
    # Setting that chooses it in a run of a few steps, {} its name; empty: it takes part in each run
    # that imports it, or in none.
    setting: str = ""
    in_update: bool = False  # Updates of ranks call it.

    @property
    def title(self) -> str:
        return self.name or self.argument.replace("_", " ")

    @property
    def registry(self) -> Registry[Any, Any]:
        return PARTS[self.argument].names()


KINDS = (
    Kind("loss", check_loss, "", "algorithm.loss={}", True),
    Kind("advantage", check_advantage, "", "algorithm.advantage={}", True),
    Kind(
        "correction",
        check_correction,
        "mismatch correction",
        "algorithm.correction.kind={}",
        in_update=True,
    ),
    Kind("group_filter", check_filter, "", "algorithm.filter.keep={}"),
    Kind("aggregation", check_aggregation, "", "algorithm.aggregation={}", True),
    Kind(
        "kl_estimator",
        check_kl_estimator,
        "KL estimator",
        "algorithm.kl_coef=0.01 algorithm.kl_estimator={}",
        in_update=True,
    ),
    Kind(
        "curriculum",
        check_curriculum,
        setting="algorithm.curriculum.cooldown=true algorithm.curriculum.kind={}",
    ),
    Kind("data_source", check_data_source, "", "data.source={}"),
    Kind("verifier", check_verifier, "", "reward.verifier={}"),
    Kind("benchmarks", check_benchmark, "benchmark"),
    Kind("trackers", check_tracker, "tracker", "runner.trackers=[tensorboard,{}]"),
    Kind("phase_observers", check_phase_observer, "phase observer"),
    Kind("step_checks", check_step_check, "step check"),
    Kind("environment", check_environment),
    Kind("transport", check_transport, "weight transport"),
    Kind("families", check_family, "model family"),
    Kind("engine_arguments", check_engine_arguments, "", "rollout.engine_arguments={}"),
)


def run(arguments: argparse.Namespace) -> int:
    """Test all that a file or a package registers, and the rewards of one that registers nothing.
    Returns the exit code: 0 if all holds. Raises UserError: it cannot be imported, or has nothing
    that can be tested."""
    places = arguments.settings[1:]
    if len(places) != 1 or "=" in places[0]:
        raise UserError("rlmath test plugin: give one file or package, such as my_file.py")
    with tempfile.TemporaryDirectory(prefix="rlmath_test_plugin_") as made:
        return check_plugin(places[0], Path(arguments.out or made).absolute())


def check_plugin(place: str, folder: Path, on_ranks: bool = True) -> int:
    """See :func:`run`; with ``on_ranks`` also on ranks, and in a run."""
    try:
        module = use(place)
    except PluginError as error:
        raise UserError(f"rlmath test plugin: {error}") from error
    registered = [
        (kind, name) for kind in KINDS for name in kind.registry.of_module(module.__name__)
    ]
    failed = False
    for kind, name in registered:
        for one in kind.check(name):
            failed |= not _say(f"{kind.title} {name}", one)
    if not registered:
        functions = public_functions(module)
        if not functions:
            raise UserError(
                f"rlmath test plugin: {place} registers none of "
                f"{', '.join(kind.title for kind in KINDS)}, and has no function that could be a "
                "reward; docs/extending.md has the decorator of each kind"
            )
        for name in functions:
            for one in check_reward(f"{place}:{name}"):
                failed |= not _say(f"reward {name}", one)
    if on_ranks and registered and not failed:
        for part, one in _on_ranks(place, registered, folder):
            failed |= not _say(part, one)
    return int(failed)


def _on_ranks(
    place: str, registered: list[tuple[Kind, str]], folder: Path
) -> Iterator[tuple[str, Finding]]:
    """Updates of ranks with each part that they call, and a run with one of each kind."""
    print("starting ranks", file=sys.stderr, flush=True)
    updates = {
        f"{kind.title} {name}": update_with(**{kind.argument: name})
        for kind, name in registered
        if kind.in_update
    }
    if updates:
        yield from check_ranks(updates, folder)
    chosen = dict(
        word.format(name).split("=", 1)
        for kind, name in reversed(registered)
        for word in kind.setting.split()
    )
    for one in check_in_run(place, chosen, folder / "run"):
        yield "all parts", one


def _say(part: str, one: Finding) -> bool:
    print(f"{'ok' if one.holds else 'FAILED':<7} {part}: {one.invariant}", flush=True)
    if not one.holds:
        print(f"        {one.text}", flush=True)
    return one.holds
