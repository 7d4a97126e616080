"""``rlmath selfcheck gpu``: its options. Imports nothing heavy, so that ``--list`` is quick."""

from __future__ import annotations

import argparse

from rlmath.commands.selfcheck.catalog import CHECKS, select
from rlmath.config.command_line import Given

RESULTS_PAGE = "docs/gpu_results.md"
# Settings of a run that mean the same here.
SETTINGS = ("model.path",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "model.path=FOLDER: a Hugging Face folder (default: a random model)"
    add("what", choices=["gpu"], help="gpu: this node's GPUs; without any, its CPU")
    add(
        "--only",
        metavar="NAME[,NAME]",
        help="only these checks; speed: those that time; see --list",
    )
    add("--list", action="store_true", help="list the checks and exit")
    add("--out", metavar="DIR", default="runs/selfcheck", help="default: runs/selfcheck")
    add("--append", action="store_true", help=f"append the results to {RESULTS_PAGE}")


def run(arguments: argparse.Namespace, given: Given) -> int:
    """List the checks, or run them. Returns 0 when none failed, else 1. Raises UserError: there is
    no such check or model, or nowhere to append to."""
    checks = select(arguments.only)
    if arguments.list:
        width = max(len(check.name) for check in CHECKS)
        print("\n".join(f"{check.name:<{width}}  {check.title}" for check in checks))
        return 0
    from rlmath.commands.selfcheck import suite

    page = RESULTS_PAGE if arguments.append else None
    return suite.run(checks, arguments.out, given.get("model.path"), page)
