"""``rlmath test plugin FILE|PACKAGE``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.correction import CORRECTIONS
from rlmath.algorithms.curriculum import CURRICULA
from rlmath.algorithms.filters import GROUP_FILTERS
from rlmath.algorithms.kl import KL_ESTIMATORS
from rlmath.algorithms.losses import LOSSES
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
from rlmath.config.benchmarks import BENCHMARKS
from rlmath.config.data_sources import DATA_SOURCES
from rlmath.config.engine_arguments import ENGINE_ARGUMENTS
from rlmath.config.environments import ENVIRONMENTS
from rlmath.engines.transport import TRANSPORTS
from rlmath.errors import UserError
from rlmath.grading.verifiers import VERIFIERS
from rlmath.model.families import FAMILY_PLUGINS
from rlmath.monitor.phase_observers import PHASE_OBSERVERS
from rlmath.monitor.trackers import TRACKERS
from rlmath.plugins import PluginError, Registry
from rlmath.plugins.loading import public_functions, use
from rlmath.training.checks.base import STEP_CHECKS


@dataclass(frozen=True)
class Kind:
    """A kind of part that can be tested."""

    name: str
    registry: Registry[Any, Any]
    check: Callable[[str], Iterator[Finding]]
    # Setting that chooses it in a run of a few steps, {} its name; empty: it takes part in each run
    # that imports it, or in none.
    setting: str = ""
    update: str = ""  # The field of an update of ranks that it is; empty: ranks do not call it.


KINDS = (
    Kind("loss", LOSSES, check_loss, "algorithm.loss={}", "loss"),
    Kind("advantage", ADVANTAGES, check_advantage, "algorithm.advantage={}", "advantage"),
    Kind(
        "mismatch correction",
        CORRECTIONS,
        check_correction,
        "algorithm.correction.kind={}",
        "correction",
    ),
    Kind("group filter", GROUP_FILTERS, check_filter, "algorithm.filter.keep={}"),
    Kind("aggregation", AGGREGATIONS, check_aggregation, "algorithm.aggregation={}", "aggregation"),
    Kind(
        "KL estimator",
        KL_ESTIMATORS,
        check_kl_estimator,
        "algorithm.kl_coef=0.01 algorithm.kl_estimator={}",
        "kl_estimator",
    ),
    Kind(
        "curriculum",
        CURRICULA,
        check_curriculum,
        "algorithm.curriculum.cooldown=true algorithm.curriculum.kind={}",
    ),
    Kind("data source", DATA_SOURCES, check_data_source, "data.source={}"),
    Kind("verifier", VERIFIERS, check_verifier, "reward.verifier={}"),
    Kind("benchmark", BENCHMARKS, check_benchmark),
    Kind("tracker", TRACKERS, check_tracker, "runner.trackers=[tensorboard,{}]"),
    Kind("phase observer", PHASE_OBSERVERS, check_phase_observer),
    Kind("step check", STEP_CHECKS, check_step_check),
    Kind("environment", ENVIRONMENTS, check_environment),
    Kind("weight transport", TRANSPORTS, check_transport),
    Kind("model family", FAMILY_PLUGINS, check_family),
    Kind(
        "engine arguments", ENGINE_ARGUMENTS, check_engine_arguments, "rollout.engine_arguments={}"
    ),
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
            failed |= not _say(f"{kind.name} {name}", one)
    if not registered:
        functions = public_functions(module)
        if not functions:
            raise UserError(
                f"rlmath test plugin: {place} registers none of "
                f"{', '.join(k.name for k in KINDS)}, and has no function that could be a reward; "
                "docs/extending.md has the decorator of each kind"
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
        f"{kind.name} {name}": update_with(**{kind.update: name})
        for kind, name in registered
        if kind.update
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
