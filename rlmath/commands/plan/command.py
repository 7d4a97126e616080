"""``rlmath plan layout|weights``: each takes the settings that it depends on."""

from __future__ import annotations

import argparse

from rlmath.commands.plan import cli as layout
from rlmath.commands.plan import weights
from rlmath.config.command_line import Given
from rlmath.errors import UserError

_PLANS = {
    "layout": (layout, "which layouts fit, with peak memory and step time"),
    "weights": (weights, "how many bytes a weight sync moves"),
}
SETTINGS = {"layout": layout.SETTINGS, "weights": weights.SETTINGS}
# One node of GPUs by default.
BASE = ("cluster=gpu8",)
# Options that print or write a run; with them all settings of the run are allowed.
ANY_WITH = {"layout": ("--command", "--write")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (module, help_) in _PLANS.items():
        plan = commands.add_parser(name, help=help_)
        plan.add_argument("model", nargs="?", help=argparse.SUPPRESS)
        module.add_arguments(plan)


def run(options: argparse.Namespace, given: Given) -> int:
    if options.model is not None:
        model = options.model
        raise UserError(f"{model}: the model is a setting; give model.path={model}")
    return _PLANS[options.what][0].run(options, given)
