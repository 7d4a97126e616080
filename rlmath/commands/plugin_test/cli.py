"""``rlmath test plugin FILE|PACKAGE``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.actor.plan import StepPlan
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
from rlmath.commands.plugin_test.filters import check_filter
from rlmath.commands.plugin_test.finding import Finding
from rlmath.commands.plugin_test.losses import check_loss
from rlmath.commands.plugin_test.ranks import check_ranks, update_with
from rlmath.commands.plugin_test.trackers import check_tracker
from rlmath.commands.plugin_test.weights_and_kl import check_aggregation, check_kl_estimator
from rlmath.errors import UserError
from rlmath.monitor.trackers import TRACKERS
from rlmath.plugins import PluginError, Registry
from rlmath.plugins.loading import use


@dataclass(frozen=True)
class Kind:
    """A kind of part that can be tested.

    Attributes:
        name: For people.
        registry: With the parts.
        check: The invariants of one part, by its name.
        update: An update of ranks with it; ``None``: ranks do not call it.
    """

    name: str
    registry: Registry[Any, Any]
    check: Callable[[str], Iterator[Finding]]
    update: Callable[[str], StepPlan] | None = None


KINDS = (
    Kind("loss", LOSSES, check_loss, lambda name: update_with(loss=name)),
    Kind("advantage", ADVANTAGES, check_advantage),
    Kind("mismatch correction", CORRECTIONS, check_correction),
    Kind("group filter", GROUP_FILTERS, check_filter),
    Kind(
        "aggregation", AGGREGATIONS, check_aggregation, lambda name: update_with(aggregation=name)
    ),
    Kind(
        "KL estimator",
        KL_ESTIMATORS,
        check_kl_estimator,
        lambda name: update_with(kl_estimator=name),
    ),
    Kind("curriculum", CURRICULA, check_curriculum),
    Kind("tracker", TRACKERS, check_tracker),
)


def run(arguments: argparse.Namespace) -> int:
    """Test all that a file or a package registers. Returns the exit code: 0 if all holds.

    Raises:
        UserError: It cannot be imported, or registers nothing that can be tested.
    """
    places = arguments.settings[1:]
    if len(places) != 1 or "=" in places[0]:
        raise UserError("rlmath test plugin: give one file or package, such as my_file.py")
    with tempfile.TemporaryDirectory(prefix="rlmath_test_plugin_") as made:
        return check_plugin(places[0], Path(arguments.out or made).absolute())


def check_plugin(place: str, folder: Path, on_ranks: bool = True) -> int:
    """See :func:`run`.

    Args:
        place: A file or a module.
        folder: For the model and the logs of ranks.
        on_ranks: Also try it on ranks.
    """
    try:
        module = use(place)
    except PluginError as error:
        raise UserError(f"rlmath test plugin: {error}") from error
    registered = [
        (kind, name) for kind in KINDS for name in kind.registry.of_module(module.__name__)
    ]
    if not registered:
        raise UserError(
            f"rlmath test plugin: {place} registers none of {', '.join(k.name for k in KINDS)}; "
            "docs/extending.md has the decorator of each kind"
        )
    failed = False
    for kind, name in registered:
        for one in kind.check(name):
            failed |= not _say(f"{kind.name} {name}", one)
    updates = {f"{kind.name} {name}": kind.update(name) for kind, name in registered if kind.update}
    if updates and on_ranks:
        print("starting ranks", file=sys.stderr, flush=True)
        for name, one in check_ranks(updates, folder):
            failed |= not _say(name, one)
    return int(failed)


def _say(part: str, one: Finding) -> bool:
    print(f"{'ok' if one.holds else 'FAILED':<7} {part}: {one.invariant}", flush=True)
    if not one.holds:
        print(f"        {one.text}", flush=True)
    return one.holds
