"""This machine, as far as the checks need it, without torch and without starting CUDA."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlmath.config.schema import Device
from rlmath.utils import nvidia_driver
from rlmath.utils import transformer_engine as te_install

# A socket's path in bytes (sun_path in unix(7), without its end), and what Ray adds to its folder.
_SOCKET_PATH_BYTES = 107
_RAY_SOCKET = "ray/session_2026-01-31_23-59-59_123456_{}/sockets/plasma_store"
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Machine:
    gpus: int  # NVIDIA GPUs that this process may use.
    torch_build: str | None  # torch's version, such as 2.13.0+cpu; None when it is not installed.
    memory_bytes: int  # Memory, the container's limit where there is one.
    disk_bytes: int | None = None  # Free space where runs go; None: asked of the run folder's disk.
    # Missing parts of Transformer Engine; None: nothing that can be seen without importing it. Only
    # looked for where there are GPUs.
    transformer_engine: str | None = None
    flash_attention: bool = True
    # The least of the GPUs', which FP8 needs; None: not known.
    compute_capability: tuple[int, int] | None = None
    # It stands for another machine, whose disks and network are not those of this one.
    elsewhere: bool = False

    @property
    def has_cuda(self) -> bool:
        return self.gpus > 0 and self.torch_build is not None and "+cpu" not in self.torch_build

    def device(self, wanted: Device) -> Device:
        if wanted is Device.auto:
            return Device.cuda if self.has_cuda else Device.cpu
        return wanted

    def free_bytes(self, path: str | Path) -> int:
        if self.disk_bytes is not None:
            return self.disk_bytes
        return shutil.disk_usage(existing_parent(path)).free

    def with_gpus(self, count: int) -> Machine:
        """This machine as if it had ``count`` GPUs with their software: to check settings for
        another one."""
        return dataclasses.replace(
            self,
            gpus=count,
            torch_build="of another machine",
            transformer_engine=None,
            flash_attention=True,
            compute_capability=None,
            disk_bytes=2**60,
            elsewhere=True,
        )

    @classmethod
    def here(cls) -> Machine:
        try:
            torch_build = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_build = None
        gpus = _visible_gpus()
        return cls(
            gpus,
            torch_build,
            _memory_bytes(),
            transformer_engine=te_install.missing_part() if gpus else None,
            flash_attention=te_install.has_flash_attention(),
            compute_capability=nvidia_driver.compute_capability() if gpus else None,
        )


def existing_parent(path: str | Path) -> Path:
    """``path`` itself, or the nearest existing folder above it."""
    path = Path(path).absolute()
    while not os.path.exists(path):  # False, and no error, without permission to look.
        path = path.parent
    return path


def unwritable(path: str | Path) -> str | None:
    """Why nothing can be written in ``path``, a folder that exists or can be made.

    A file is written and removed, as permissions say nothing of read-only and full file systems.
    """
    above = existing_parent(path)
    for one in (Path(path), *Path(path).parents):
        if os.path.islink(one) and not os.path.exists(one):
            return f"{one} is a link to nothing"
    if not above.is_dir():
        return f"{above} is a file"
    try:
        with tempfile.TemporaryFile(dir=above) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
    except PermissionError:
        return f"no permission to write in {above}"
    except OSError as error:
        return f"{above} cannot be written ({error.strerror})"
    return None


def ray_folder_problem() -> str | None:
    """Why Ray cannot start in the folder that it makes its sockets in; ``None``: it can."""
    name = next((one for one in ("RAY_TMPDIR", "TMPDIR") if one in os.environ), None)
    if name is None:
        return None
    folder, cure = os.environ[name], "set RAY_TMPDIR=/tmp"
    if not Path(folder).is_dir():
        return f"{name}={folder}: no such folder; make it, or {cure}"
    if reason := unwritable(folder):
        return f"{name}={folder}: {reason}; {cure}"
    pid = Path("/proc/sys/kernel/pid_max")
    longest = len(str(int(pid.read_text()) - 1)) if pid.is_file() else 7
    below = len(_RAY_SOCKET.format("9" * longest)) + 1
    length = len(os.fsencode(folder.rstrip("/")))
    if length + below <= _SOCKET_PATH_BYTES:
        return None
    return (
        f"{name}={folder}: {length} bytes + {below} that Ray adds for the path of a socket = "
        f"{length + below}, more than the {_SOCKET_PATH_BYTES} that the system allows; {cure}, or "
        f"another folder of at most {_SOCKET_PATH_BYTES - below} bytes"
    )


def _visible_gpus() -> int:
    cards = Path("/proc/driver/nvidia/gpus")
    # Containers often hide /proc but give the device files.
    there = len(list(cards.iterdir())) if cards.is_dir() else 0
    there = there or len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    # CUDA stops at the first name that is not valid, such as -1.
    names = [name.strip() for name in visible.split(",")]
    valid = 0
    for name in names:
        if not name or name.startswith("-"):
            break
        valid += 1
    return min(there, valid)


def _memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            memory = min(memory, int(text))
    return memory
