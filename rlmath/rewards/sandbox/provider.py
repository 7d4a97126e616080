"""The interface between code rewards and the place where programs run."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlmath.rewards.base import RewardSettingError

Status = Literal["ok", "runtime_error", "timeout", "memory", "output_limit", "disk_limit"]


class ProviderError(Exception):
    """The provider failed, not the program: nothing can be said about the program."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    Attributes:
        cpu_s: Processor time of each process, in whole seconds.
        wall_s: Time on the clock, in seconds.
        memory_mib: Address space of each process, and resident memory of all together.
        file_size_mib: Longest file, and all files together.
        output_kib: Standard output, and standard error, each.
        processes: Processes and threads at once.
        open_files: Open files of each process.
    """

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_mib: int = 512
    file_size_mib: int = 64
    output_kib: int = 4096
    processes: int = 32
    open_files: int = 64

    def __post_init__(self) -> None:
        low = [f"{k}={v}" for k, v in vars(self).items() if v <= 0]
        if low:
            raise RewardSettingError(f"sandbox limits must be above 0: {', '.join(low)}")


@dataclass(frozen=True)
class Program:
    """A program in one file, and what stands beside it.

    Attributes:
        language: ``python``, ``cpp``, ``c``, ``javascript``, ``bash``, or what the provider knows.
        source: Text of the main file.
        args: Its arguments.
        files: Further files, by path relative to its folder.
        collect: Files to bring back after a run, by the same kind of path.
    """

    language: str
    source: str
    args: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    collect: tuple[str, ...] = ()


@dataclass(frozen=True)
class Execution:
    """How one run ended.

    Attributes:
        status: ``ok`` (exit code 0), ``runtime_error``, or the limit that ended it.
        stdout: What it printed, up to the limit.
        stderr: The same for standard error.
        exit_code: Its exit code; negative for the signal that ended it; ``None`` if unknown.
        seconds: Time on the clock.
        files: The collected files that exist, as text.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)


class PreparedProgram(ABC):
    """A program, compiled if its language asks for it. A context manager."""

    compile_error: str | None = None

    @abstractmethod
    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        """Run it once, with clean files.

        Args:
            stdin: Its standard input.
            files: More files for this run.

        Raises:
            ProviderError: The provider failed.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what was prepared."""

    def __enter__(self) -> PreparedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CodeProvider(ABC):
    """A place where programs run. Safe from several threads.

    Attributes:
        max_parallel: Runs at once.
    """

    max_parallel: int = 1

    @abstractmethod
    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        """Compile ``program`` if need be.

        A program that does not compile has ``compile_error`` set, and must not be run.

        Raises:
            ProviderError: The provider failed, or does not know the language.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything."""


_ALIASES = {
    "py": "python",
    "python3": "python",
    "pypy3": "python",
    "c++": "cpp",
    "cxx": "cpp",
    "c++17": "cpp",
    "c++20": "cpp",
    "cpp17": "cpp",
    "js": "javascript",
    "node": "javascript",
    "nodejs": "javascript",
    "sh": "bash",
    "shell": "bash",
}


def canonical_language(name: str) -> str:
    """One name for each language: ``py`` and ``python3`` are ``python``."""
    lowered = name.strip().lower()
    return _ALIASES.get(lowered, lowered)


def language_names(language: str) -> tuple[str, ...]:
    """All names of a language, as they stand behind a code fence."""
    canonical = canonical_language(language)
    return (canonical, *(alias for alias, name in _ALIASES.items() if name == canonical))


_PROVIDERS = {
    "local": "rlmath.rewards.sandbox.local:LocalProvider",
    "piston": "rlmath.rewards.sandbox.piston:PistonProvider",
    "e2b": "rlmath.rewards.sandbox.e2b:E2BProvider",
    "morph": "rlmath.rewards.sandbox.morph:MorphProvider",
}


def get_provider(name: str, **settings: Any) -> CodeProvider:
    """A provider by name, or by ``package.module:Class`` for one of your own.

    Raises:
        RewardSettingError: No such provider, a setting that it does not have, or a package that
            it needs and that is not installed.
    """
    path = _PROVIDERS.get(name, name)
    if ":" not in path:
        raise RewardSettingError(
            f"no code provider {name!r}; there are {', '.join(_PROVIDERS)}, and "
            f"package.module:Class for your own"
        )
    module, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardSettingError(f"code provider {name}: {error}") from error
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters)
        raise RewardSettingError(
            f"code provider {name}: {error}; its settings: {known or 'none'}"
        ) from error
    made = factory(**settings)
    if not isinstance(made, CodeProvider):
        raise RewardSettingError(f"code provider {name}: {attribute} made no CodeProvider")
    return made
