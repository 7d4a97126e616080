"""The console command: ``rlmath train|sft|evaluate|report|doctor|selfcheck|plan ...``.

Settings are composed and checked here, before torch, vLLM or Megatron is imported, so that a
mistake costs a second.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import rlmath
from rlmath.errors import UserError
from rlmath.utils.command_line import EXIT_USER_ERROR, run_command

if TYPE_CHECKING:
    from rlmath.checks.machine import Machine
    from rlmath.config.command_line import Given
    from rlmath.config.load import Composed
    from rlmath.config.schema import Config


class Command(Protocol):
    """A module of ``rlmath.commands``. The settings that it lists in ``SETTINGS``, by subcommand if
    it has several, may be given as ``key=value``, and ``run`` gets them as ``Given``; for ``BASE``
    and ``ANY_WITH`` see :func:`rlmath.config.command_line.take_settings`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, options: argparse.Namespace, *given: Given) -> int:
        """Do the work. Returns the exit code."""


# Module of ``rlmath.commands`` and help of each command. Commands that take every setting have a
# module with ``run(config)``.
_WITH_A_CONFIG = {
    "train": (
        "rlmath.training.loop",
        "reinforcement learning: sample, grade, update, sync weights",
    ),
    "sft": (
        "rlmath.training.sft",
        "supervised fine-tuning on worked examples, for a warm start",
    ),
    "evaluate": ("rlmath.commands.evaluate", "sample and grade held-out problems"),
}
_COMMANDS = {
    "sample": (
        "sample",
        "keep a model's right answers as worked examples for sft: sample FILE --keep correct",
    ),
    "watch": ("watch", "follow a run that was started elsewhere: watch RUN_DIR"),
    "report": (
        "report.cli",
        "write a run, or a comparison of two, as one HTML file: report RUN_DIR [RUN_DIR]",
    ),
    "explain": (
        "explain.cli",
        "break a change of the mean reward into its causes: explain RUN_DIR --steps A:B",
    ),
    "bisect": (
        "bisect.cli",
        "find the first step, phase and item where two runs diverge: bisect RUN_A RUN_B",
    ),
    "why": ("why", "show what is recorded of one sample: why RUN_DIR STEP/PROBLEM/INDEX"),
    "replay": (
        "replay.cli",
        "redo a step's update and compare it: replay RUN_DIR STEP [key=value ...]",
    ),
    "drill": (
        "drill.cli",
        "inject silent faults into a small run with your settings; report which alarm fires: drill "
        "EXPERIMENT",
    ),
    "test": (
        "recipe_test.cli",
        "run thirty steps of a recipe on a tiny model, check and resume it: test RECIPE; or "
        "check a loss or another part of yours: test plugin FILE",
    ),
    "settings": (
        "settings",
        "print settings with type, range, default and meaning: settings [WORD]",
    ),
    "doctor": ("doctor", "find problems of this machine, or of a run's settings"),
    "publish": (
        "publish",
        "copy a run's model, with a card, to a hub or a folder: publish RUN_DIR "
        "ORGANIZATION/NAME|FOLDER",
    ),
    "convert": (
        "convert",
        "a checkpoint as a Hugging Face folder, or back: convert to-hf CHECKPOINT FOLDER",
    ),
    "validate": (
        "validate",
        "compare log-probs of Megatron, transformers and vLLM: validate MODEL",
    ),
    "selfcheck": (
        "selfcheck.cli",
        "test and benchmark this node in about 15 minutes; writes one file: selfcheck gpu",
    ),
    "grade": (
        "grade",
        "grade a file of responses and accepted answers: grade FILE [--against math-verify]",
    ),
    "import": (
        "importing.cli",
        "settings of verl, TRL or OpenRLHF as an experiment: import FILE",
    ),
    "plan": (
        "plan.command",
        "predict before a run: plan layout (what fits), plan weights (cost of a weight sync), each "
        "with model.path=MODEL",
    ),
}
COMMANDS = _WITH_A_CONFIG | _COMMANDS
# As --help shows them.
_GROUPS = {
    "train and evaluate": ("train", "sft", "sample", "evaluate"),
    "understand a run": ("watch", "report", "explain", "why", "bisect", "replay"),
    "before a run": ("settings", "plan", "doctor", "selfcheck", "test", "drill"),
    "models, data and other libraries": ("grade", "import", "convert", "validate", "publish"),
}
# Commands that may take days.
_RUNS = (*_WITH_A_CONFIG, "sample")
# Imported packages of the extras cpu and cuda; tests/unit/test_dependencies.py.
_PACKAGES = (
    "datasets", "fsspec", "httpx", "huggingface_hub", "hydra", "latex2mathml", "matplotlib",
    "megatron", "numpy", "omegaconf", "packaging", "prometheus_client", "psutil", "pyarrow", "ray",
    "rich", "safetensors", "tensorboard", "tokenizers", "torch", "transformer_engine",
    "transformers", "vllm", "websockets", "xxhash",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: it failed, with a traceback. 2: settings or input that cannot work, with one
    message. 3: done, but its mirror is incomplete. 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(_checked_packages, arguments, is_run=[*arguments, ""][0] in _RUNS)


def _checked_packages(arguments: list[str]) -> int:
    """Run a command; name the extra if one of its packages is missing.

    ``rlmath grade`` needs none of them, and so they are not installed by default.
    """
    try:
        return _dispatch(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise UserError(
            f"the package {package} is not installed; install rlmath[cpu] on a machine "
            "without GPU, or rlmath[cuda]"
        ) from error


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] == "--version":
        print(f"rlmath {rlmath.__version__}")
        return 0
    command, *rest = arguments
    if command in _WITH_A_CONFIG:
        return _run(command, _parse(command, rest))
    if command not in _COMMANDS:
        raise UserError(f"rlmath has no command {command!r}; it has {', '.join(COMMANDS)}")
    path, description = _COMMANDS[command]
    module: Command = importlib.import_module(f"rlmath.commands.{path}")  # type: ignore[assignment]
    parser = _Parser(prog=f"rlmath {command}", description=description)
    module.add_arguments(parser)
    if not hasattr(module, "SETTINGS"):
        return module.run(parser.parse_intermixed_args(rest))
    settings = _declared_arguments(module, "SETTINGS", rest)
    if settings is None:
        parser.parse_args(rest)  # Its error lists the subcommands.
        raise AssertionError("a subcommand that is known has settings")
    from rlmath.config.command_line import take_settings

    base, any_with = (
        _declared_arguments(module, name, rest) or () for name in ("BASE", "ANY_WITH")
    )
    given, rest = take_settings(rest, settings, base, any_with)
    return module.run(parser.parse_args(rest), given)


def _declared_arguments(
    module: Command, name: str, arguments: Sequence[str]
) -> tuple[str, ...] | None:
    """Arguments of a command, for the subcommand that is asked for if it has several."""
    found = getattr(module, name, None)
    if isinstance(found, dict):
        return next((value for word, value in found.items() if word in arguments), None)
    return found


def _parse(command: str, arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"rlmath {command}",
        description=COMMANDS[command][1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_epilog(command),
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, see docs/settings.md"
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your own config groups")
    parser.add_argument("--cfg", action="store_true", help="print the resolved settings and exit")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check settings and files (weights of up to 4 GiB for NaN), print the batch, and exit",
    )
    return parser.parse_intermixed_args(arguments)


def _run(command: str, options: argparse.Namespace) -> int:
    from rlmath.checks import start
    from rlmath.config import load

    composed = load.compose_settings(options.overrides, options.config_dir)
    if options.cfg:
        print(load.to_yaml(composed.config), end="")
        return 0
    ready = start.ready(composed.config, command, check_only=options.check)  # type: ignore[arg-type]
    config, found = ready.config, ready.continuation
    print("\n".join(_overview(composed, config, command, ready.machine)), flush=True)
    ready.report()
    if ready.is_finished:
        if not options.check:
            _finish_mirror(config)
        return 0
    if options.check:
        from rlmath.checks.trial import trial

        if found is not None:
            from rlmath.training import resumed_model

            compare = {
                "train": resumed_model.check_resumed_model,
                "sft": resumed_model.check_resumed_weights,
            }
            compare[command](config, found.checkpoint)
        if command != "evaluate" and Path(config.model.path).is_dir():
            from rlmath.training.export_rehearsal import rehearse_export

            rehearse_export(config.model.path)
        print("".join(f"{line}\n" for line in trial(config, command)), end="", flush=True)
        print("".join(f"note     {note}\n" for note in ready.notes), end="")
        print("check    passed: without --check, this starts", flush=True)
        return 0
    from rlmath.utils.paused_collector import paused_collector

    with paused_collector():
        module = importlib.import_module(_WITH_A_CONFIG[command][0])
    return int(module.run(config))


def _finish_mirror(config: Config) -> None:
    """Upload what a finished run's remote folder lacks."""
    from rlmath.checkpoint.mirror import mirroring
    from rlmath.utils.run_lock import only_run_in

    runner = config.runner
    with (
        only_run_in(runner.run_dir),
        mirroring(runner.run_dir, runner.mirror, runner.mirror_wait_s),
    ):
        pass


def _overview(composed: Composed, config: Config, command: str, machine: Machine) -> Iterator[str]:
    from rlmath.checks import overview
    from rlmath.checks import run as checks
    from rlmath.config import arithmetic
    from rlmath.config.schema import Device

    model = checks.known_model(config)
    if model is not None:
        yield overview.describe_model(config, model)
    if command == "evaluate":
        yield overview.describe_evaluation(config)
        return
    if command == "sft":
        yield overview.describe_sft(config, composed.origin)
        return
    device = machine.device(config.cluster.device)
    yield arithmetic.describe(config, arithmetic.resolve_layout(config, device))
    if model is not None and device is Device.cuda:
        from rlmath.commands.plan.settings_memory import describe_memory

        yield from describe_memory(config, model)
    yield overview.describe_training(config, composed.origin)
    recipe = overview.describe_recipe(composed)
    if recipe:
        yield recipe


def _help() -> str:
    lines = ["usage: rlmath COMMAND [--cfg | --check] [--config-dir DIR] [key=value ...]", ""]
    for title, names in _GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<10} {COMMANDS[name][1]}" for name in names), ""]
    lines += [
        "  rlmath COMMAND --help   its options and the experiments",
        "  rlmath --version",
    ]
    return "\n".join(lines)


def _epilog(command: str) -> str:
    from rlmath.config.groups import CONF_DIR, options

    groups = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir())
    lines = ["groups (GROUP=OPTION):"]
    lines += [f"  {group:<11}{', '.join(options(group))}" for group in groups]
    lines += [
        "",
        "examples:",
        f"  rlmath {command} experiment=quickstart",
        f"  rlmath {command} experiment=quickstart actor.tensor_parallel=1 --cfg",
    ]
    return "\n".join(lines)
