"""The interface of code providers, which run programs for code rewards."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlmath.errors import InfrastructureError
from rlmath.rewards.base import RewardSettingError

Status = Literal["ok", "runtime_error", "timeout", "memory", "output_limit", "disk_limit"]


class ProviderError(InfrastructureError):
    """The provider failed, so nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    cpu_s: int = 5  # CPU time of each process, in whole seconds.
    wall_s: float = 10.0  # Wall time, in seconds.
    memory_mib: int = 512  # Address space of each process, and resident memory of all together.
    file_size_mib: int = 64  # Size of each file, and of all together.
    output_kib: int = 4096  # Size of standard output, and of standard error.
    processes: int = 32  # Number of processes and threads.
    open_files: int = 64  # Number of open files of each process.

    def __post_init__(self) -> None:
        low = [f"{k}={v}" for k, v in vars(self).items() if v <= 0]
        if low:
            raise RewardSettingError(f"sandbox limits must be above 0: {', '.join(low)}")


@dataclass(frozen=True)
class Program:
    """A program in one file, with its arguments and files."""

    language: str  # python, cpp, c, javascript, bash, or another of the provider.
    source: str  # Text of the main file.
    args: tuple[str, ...] = ()
    # Additional files, by path relative to the program's folder.
    files: Mapping[str, str] = field(default_factory=dict)
    collect: tuple[str, ...] = ()  # Files to return after a run, by relative path.


@dataclass(frozen=True)
class Execution:
    """Result of one run."""

    status: Status  # ok (exit code 0), runtime_error, or the limit that ended it.
    stdout: str = ""  # Standard output up to the limit, like stderr.
    stderr: str = ""
    exit_code: int | None = None  # Exit code; a signal as its negated number; None if unknown.
    seconds: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)  # Collected files that exist, as text.


class PreparedProgram(ABC):
    """A program, compiled if its language needs it. A context manager."""

    compile_error: str | None = None

    @abstractmethod
    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        """Run the program once, with clean files. Raises ProviderError: the provider failed."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the prepared program."""

    def __enter__(self) -> PreparedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CodeProvider(ABC):
    """Runs programs. Thread-safe. ``max_parallel``: maximum number of concurrent runs."""

    max_parallel: int = 1

    @abstractmethod
    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        """Compile ``program`` if its language needs it.

        If it does not compile, ``compile_error`` is set and it must not be run. Raises
        ProviderError: the provider failed, or does not know the language.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything."""


@dataclass(frozen=True)
class Language:
    """How to build and run programs of one language. ``{python}`` is the interpreter.

    ``stack_share`` is the share of the memory limit for the main thread's stack; each further
    thread reserves as much when it starts.
    """

    file: str
    aliases: tuple[str, ...]  # Its other names.
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    limit_address_space: bool = True
    stack_share: float = 1 / 16

    @property
    def tool(self) -> str:
        return (self.compile or self.run)[0]


LANGUAGES = {
    "python": Language("main.py", ("py", "python3", "pypy3"), ("{python}", "-B", "main.py")),
    "cpp": Language(
        "main.cpp",
        ("c++", "cxx", "c++17", "c++20", "cpp17"),
        ("./main",),
        ("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
        stack_share=1 / 2,  # solutions recurse deeply and start no threads
    ),
    "c": Language(
        "main.c",
        (),
        ("./main",),
        ("gcc", "-O2", "-std=c17", "-o", "main", "main.c", "-lm"),
        stack_share=1 / 2,
    ),
    # V8 reserves far more addresses than it uses; resident memory is limited instead.
    "javascript": Language(
        "main.js", ("js", "node", "nodejs"), ("node", "main.js"), limit_address_space=False
    ),
    "bash": Language("main.sh", ("sh", "shell"), ("bash", "main.sh")),
}


def canonical_language(name: str) -> str:
    """The canonical name of a language: ``py`` and ``python3`` are ``python``."""
    lowered = name.strip().lower()
    return next((known for known, one in LANGUAGES.items() if lowered in one.aliases), lowered)


def language_of(program: Program) -> Language:
    """The language of a program. Raises ProviderError: sandboxes do not know it."""
    name = canonical_language(program.language)
    if name not in LANGUAGES:
        raise ProviderError(
            f"language {program.language!r}: sandboxes run {', '.join(sorted(LANGUAGES))}"
        )
    return LANGUAGES[name]


def language_names(language: str) -> tuple[str, ...]:
    """All names of a language that may follow a code fence."""
    canonical = canonical_language(language)
    return (canonical, *(LANGUAGES[canonical].aliases if canonical in LANGUAGES else ()))


_PROVIDERS = {
    "local": "rlmath.rewards.sandbox.local:LocalProvider",
    "piston": "rlmath.rewards.sandbox.piston:PistonProvider",
    "e2b": "rlmath.rewards.sandbox.e2b:E2BProvider",
    "morph": "rlmath.rewards.sandbox.morph:MorphProvider",
}


def get_provider(name: str, **settings: Any) -> CodeProvider:
    """A provider by name, or by ``package.module:Class`` for your own. Raises RewardSettingError:
    unknown provider or setting, or a package that it needs is not installed."""
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
