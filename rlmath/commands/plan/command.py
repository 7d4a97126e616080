"""``rlmath plan layout|weights``: each takes the settings that it depends on."""

from __future__ import annotations

import argparse

from rlmath.commands.plan import cli as layout
from rlmath.commands.plan import weights
from rlmath.config.command_line import Given

SETTINGS = {"layout": layout.SETTINGS, "weights": weights.SETTINGS}
# One node of GPUs unless it is said otherwise.
BASE = ("cluster=gpu8",)
# What is printed or written for a run may have its other settings too.
ANY_WITH = {"layout": ("--command", "--write")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    layout.add_arguments(
        what.add_parser("layout", help="which layouts fit, with peak memory and step time")
    )
    weights.add_arguments(what.add_parser("weights", help="how many bytes a weight sync moves"))


def run(options: argparse.Namespace, given: Given) -> int:
    return (layout if options.what == "layout" else weights).run(options, given)
