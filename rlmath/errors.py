"""Errors that the user can fix: one message, no traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """``text`` with control characters spelled out, so that text from a file or a model
    cannot control the terminal that shows it."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class UserError(Exception):
    """Something in the settings, the files or the machine that the user can change.

    The message names the thing (setting, file, line, field), says with figures what is wrong, and
    how to fix it. The console command prints it and exits with
    ``exit_code``.
    """

    exit_code = 2


class GpuFailure(UserError):
    """A GPU is broken and no other can replace it; ``launchers/slurm.sbatch`` requeues the job
    without its node at this exit code."""

    exit_code = 75


class ComponentError(RuntimeError):
    """A part of a run failed: a rank, an engine. The message names it.

    Attributes:
        raised: The part's code raised the error and is likely to raise it again; otherwise its
            process ended or hung.
    """

    def __init__(self, message: str, *, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


class InfrastructureError(Exception):
    """A tool could not run, for reasons that the model has nothing to do with."""


class UpdateStopped(Exception):
    """The ranks stopped within a pass on request. No weight has changed in the step."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, out of range, or impossible with others."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigError:
        """One error for one or more problems, each a complete line."""
        if len(problems) == 1:
            return cls(problems[0])
        lines = [f"{len(problems)} errors", *problems]
        return cls("\n  - ".join(lines))


class ModelError(UserError):
    """A config.json that is missing, cannot be read, or describes a model that is not supported."""


class WeightsError(UserError):
    """Weights that are missing, unknown, of another shape, or do not fit the layout."""
