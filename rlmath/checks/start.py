"""All checks and downloads before a command starts anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.fetch import describe_remote, fetch_run
from rlmath.checkpoint.remote import is_url
from rlmath.checks import attempts, network
from rlmath.checks.machine import Machine
from rlmath.checks.mirror import remote_problems
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.checks.run import Command, check, known_model
from rlmath.config.schema import Config, Device
from rlmath.config.settings import replace_values
from rlmath.errors import ConfigError
from rlmath.model import hub


@dataclass(frozen=True)
class Ready:
    """Settings with which a command can start."""

    config: Config  # Settings with the model's folder and the prompts' style decided.
    machine: Machine
    warnings: tuple[str, ...]
    notes: tuple[str, ...]  # Notes on what was not checked.
    # The checkpoint that is continued; None: the command starts from the beginning.
    continuation: attempts.Continuation | None

    @property
    def is_finished(self) -> bool:
        return self.continuation is not None and self.continuation.finished

    def report(self) -> None:
        """Print warnings, and what is continued."""
        print("".join(f"warning  {text}\n" for text in self.warnings), end="", flush=True)
        if self.continuation is not None:
            print(self.continuation.describe(), flush=True)


def ready(config: Config, command: Command, *, check_only: bool = False) -> Ready:
    """Check settings, files and servers; download a model of the hub that is missing.

    With ``check_only`` nothing is downloaded, and the machine may be another one than the run's.
    Raises UserError: something is wrong; one message has all problems.
    """
    machine, notes = _machine(config, check_only=check_only)
    if hub.is_hub_model(config.model.path):
        config = _with_hub_model(config, command, machine, notes, check_only=check_only)
    config = with_prompt_style(config, command)
    check(config, command, machine)
    answers = network.ask(config, command, elsewhere=machine.elsewhere, ask_hub=check_only)
    if answers.problems:
        raise ConfigError.of(answers.problems)
    resumes = command == "train" or (command == "sft" and config.sft.save_every)
    if resumes and is_url(config.runner.resume):
        folder = attempts.LOOPS[command].checkpoints
        config = _with_remote_run(config, folder, notes, check_only=check_only)
        problems = [*attempts.refusals(config, command)]
        if not check_only:  # Its folder has the run's id now.
            problems += remote_problems(config, command)
        if problems:
            raise ConfigError.of(problems)
    found = attempts.continuation(config, command)
    return Ready(config, machine, tuple(answers.warnings), tuple(notes), found)


def _with_remote_run(config: Config, folder: str, notes: list[str], *, check_only: bool) -> Config:
    """The settings with which a run that is in a remote folder continues, downloaded to its own."""
    url, run_dir = config.runner.resume, config.runner.run_dir
    if check_only:
        newest = describe_remote(url, folder)
        notes.append(
            f"runner.resume={url}: {newest}, will be downloaded to {run_dir}; its checksums, and "
            "settings that changed, are not checked"
        )
        how = "never"
    else:
        how = fetch_run(url, Path(run_dir), folder)
    return replace_values(config, {"runner.resume": how})


def _machine(config: Config, *, check_only: bool) -> tuple[Machine, list[str]]:
    """The machine to check for, and the checks that this leaves out.

    ``--check`` of settings for GPUs works on a machine without them, such as a login node.
    """
    here, cluster = Machine.here(), config.cluster
    gpus = cluster.gpus_per_node
    enough = here.has_cuda and here.gpus >= gpus
    if not check_only or cluster.device is not Device.cuda or enough:
        return here, []
    has = f"{here.gpus} GPUs" if here.gpus else "no GPU"
    note = (
        f"this machine has {has}; checked for {cluster.nodes} x {gpus} GPUs of the settings. "
        "Driver, packages and free disk space are not checked: rlmath doctor does that there"
    )
    return here.with_gpus(gpus), [note]


def _with_hub_model(
    config: Config, command: Command, machine: Machine, notes: list[str], *, check_only: bool
) -> Config:
    """The settings with the folder of a model of the hub, which is downloaded if it is missing and
    everything else is in order."""
    name = config.model.path
    folder = hub.cached_model(name)
    if folder is None and check_only:
        known = known_model(config) is not None
        sizes = "its sizes are known by name" if known else "its sizes are not known, nor checked"
        notes.append(f"model.path={name} will be downloaded from the hub; {sizes}")
        return config
    if folder is None:
        check(config, command, machine)
        print(f"model    {name}: downloading from the hub", flush=True)
        folder = hub.download_model(name)
    return replace_values(config, {"model.path": str(folder)})
