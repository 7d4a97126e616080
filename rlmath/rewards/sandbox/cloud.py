"""Programs in cloud sandboxes that run Python code and return its output, such as E2B and Morph.

A script writes the files, compiles, runs the program as a child process with its own limits, and
prints one line of JSON after a mark that the program cannot know.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox.provider import (
    CodeProvider,
    Execution,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
    language_of,
)

_COMPILE_S = 60

_SCRIPT = """
import json, os, resource, shutil, signal, subprocess, tempfile, time
job = json.loads({job!r})
folder = tempfile.mkdtemp()
for name, text in job["files"].items():
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
limit = job["output_bytes"]

def bounded():
    memory = job["memory_bytes"]
    if job["limit_address_space"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], job["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def run(command, timeout_s, stdin, prepare):
    # Output goes to files: they hold the size limit, where a pipe would be read without one.
    with open(os.path.join(folder, ".in"), "w+") as given, \\
            open(os.path.join(folder, ".out"), "wb+") as out, \\
            open(os.path.join(folder, ".err"), "wb+") as err:
        given.write(stdin)
        given.seek(0)
        begun = time.monotonic()
        child = subprocess.Popen(command, cwd=folder, stdin=given, stdout=out, stderr=err,
                                 start_new_session=True, preexec_fn=prepare)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begun
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        out.seek(0)
        err.seek(0)
        return (code, out.read(limit + 1).decode("utf-8", "replace"),
                err.read(limit + 1).decode("utf-8", "replace"), seconds)

reply = {{}}
if job["compile"]:
    code, out, err, _ = run(job["compile"], job["compile_s"], "", None)
    if code != 0:
        reply["compile_error"] = (err or out or "it took too long")[:20000]
if "compile_error" not in reply:
    code, out, err, seconds = run(job["run"], job["wall_s"], job["stdin"], bounded)
    reply.update(code=code, stdout=out, stderr=err, seconds=seconds, files={{}})
    for name in job["collect"]:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, errors="replace") as file:
                reply["files"][name] = file.read(limit)
shutil.rmtree(folder, ignore_errors=True)
print("\\n" + {mark!r} + json.dumps(reply))
"""


def total_limit_s(limits: Limits) -> float:
    """Maximum duration of the script in seconds, compiling included."""
    return limits.wall_s + _COMPILE_S + 15.0


def build_script(
    program: Program, limits: Limits, stdin: str, files: Mapping[str, str]
) -> tuple[str, str]:
    """The script for one run, and the mark before its reply. Raises ProviderError: unknown
    language."""
    language = language_of(program)
    mark = f"rlmath-{token_hex(16)}:"
    job = {
        "files": {**program.files, **files, language.file: program.source},
        "compile": list(language.compile),
        "compile_s": _COMPILE_S,
        "run": [part.replace("{python}", "python3") for part in language.run] + [*program.args],
        "stdin": stdin,
        "cpu_s": limits.cpu_s,
        "wall_s": limits.wall_s,
        "memory_bytes": limits.memory_mib * 2**20,
        "limit_address_space": language.limit_address_space,
        "file_bytes": limits.file_size_mib * 2**20,
        "output_bytes": limits.output_kib * 1024,
        "collect": list(program.collect),
    }
    return _SCRIPT.format(job=json.dumps(job), mark=mark), mark


def read_reply(printed: str, mark: str, limits: Limits) -> tuple[Execution, str | None]:
    """The result of the run, and the compiler's error if there was one. Raises ProviderError: the
    mark is missing, so the script did not finish."""
    _, found, tail = printed.rpartition(mark)
    if not found:
        raise ProviderError(f"the sandbox printed no reply; it printed {printed[-200:]!r}")
    reply: dict[str, Any] = json.loads(tail.splitlines()[0])
    if "compile_error" in reply:
        message = str(reply["compile_error"])
        return Execution("runtime_error", stderr=message), message
    code = reply["code"]
    limit = limits.output_kib * 1024
    if code is None or code in (-24, -9):  # SIGXCPU, or SIGKILL past the hard limit
        status = "timeout"
    elif len(reply["stdout"]) > limit or len(reply["stderr"]) > limit:
        status = "output_limit"
    else:
        status = "ok" if code == 0 else "runtime_error"
    return (
        Execution(
            status=status,  # type: ignore[arg-type]
            stdout=reply["stdout"][:limit],
            stderr=reply["stderr"][:limit],
            exit_code=code,
            seconds=reply["seconds"],
            files=reply["files"],
        ),
        None,
    )


class CloudProvider(CodeProvider):
    """Runs each program in its own sandbox. Raises RewardSettingError: the package or the key is
    missing.

    Args:
        name: As in the settings; ``NAME_API_KEY`` is the variable of the key.
        package: As pip knows it.
        modules: Its modules; :attr:`sdk` has them.
    """

    def __init__(
        self, name: str, package: str, modules: list[str], max_parallel: int, api_key: str | None
    ) -> None:
        try:
            self.sdk: list[Any] = [importlib.import_module(one) for one in modules]
        except ImportError as error:
            raise RewardSettingError(
                f"the code provider {name} needs the package {package} "
                f"(pip install {package}); the provider local needs none"
            ) from error
        variable = f"{name.upper()}_API_KEY"
        self.api_key = api_key or os.environ.get(variable)
        if not self.api_key:
            raise RewardSettingError(
                f"the code provider {name} needs an API key: set {variable} or "
                "provider_settings.api_key"
            )
        self.name, self.max_parallel = name, max_parallel
        self._slots = threading.BoundedSemaphore(max_parallel)

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        build_script(program, limits, "", {})  # fail on an unknown language before renting
        return _CloudProgram(self, program, limits)

    def run_python(self, script: str, timeout_s: float) -> str:
        with self._slots:
            try:
                return self.run_in_new_sandbox(script, timeout_s)
            except Exception as error:  # the SDKs' exception classes are not stable
                raise ProviderError(f"{self.name}: {type(error).__name__}: {error}") from error

    @abstractmethod
    def run_in_new_sandbox(self, script: str, timeout_s: float) -> str:
        """Output of a script; the sandbox is ended."""


@dataclass
class _CloudProgram(PreparedProgram):
    provider: CloudProvider
    program: Program
    limits: Limits

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        script, mark = build_script(self.program, self.limits, stdin, files or {})
        printed = self.provider.run_python(script, total_limit_s(self.limits))
        result, self.compile_error = read_reply(printed, mark, self.limits)
        return result
