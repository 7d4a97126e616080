"""Whether Transformer Engine is installed, completely or in part. Does not import torch.

``find_spec`` finds a Transformer Engine whose extension for torch was never built. The cheap check
looks for the extension as Transformer Engine's own loader does; the real one imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

CORE_DISTRIBUTIONS = ("transformer-engine-cu13", "transformer-engine-cu12")
EXTENSION = "transformer_engine_torch"
# Libraries that it loads by name, each with the packages' folder that has it.
PACKAGED_LIBRARIES = {"CUDNN": "cudnn", "NVRTC": "cu13", "CURAND": "cu13"}
# Its flash attention is that of one of these; the second is for Hopper alone.
FLASH_ATTENTION_DISTRIBUTIONS = ("flash-attn", "flash-attn-3")


def missing_part() -> str | None:
    """What Transformer Engine lacks here, from files and metadata alone; ``None``: nothing.

    Takes milliseconds. An installation that passes can still fail to import.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return "it is not installed"
    package = Path(spec.origin).parent
    if not _extension_in(package) and not _extension_in(_site_packages() / package.name):
        return f"its extension for torch, {EXTENSION}*.so, was not built"
    extension, core = _version(EXTENSION), [_version(name) for name in CORE_DISTRIBUTIONS]
    main = _version("transformer-engine")
    # Without a distribution of the extension it was built from source, in one piece.
    if extension is not None and {extension} != {v for v in (main, *core) if v is not None}:
        return (
            f"its parts are of different versions: transformer-engine {main}, {EXTENSION} "
            f"{extension}, core {', '.join(v for v in core if v) or 'not installed'}"
        )
    return None


def has_flash_attention() -> bool:
    """Whether one of the packages is installed that Transformer Engine's flash attention calls."""
    return any(_version(name) is not None for name in FLASH_ATTENTION_DISTRIBUTIONS)


def use_packaged_libraries() -> None:
    """Have Transformer Engine load the CUDA libraries that are installed as packages beside it.

    Its loader looks below ``CUDNN_HOME`` (and so on), ``CUDA_HOME`` and ``/usr/local/cuda`` before
    it looks at packages, and takes the first file of that name, of whatever version. Torch has
    loaded the packages' by then. On a machine with cuDNN 9.14 in its CUDA toolkit, torch 2.13 then
    refused to continue, or fused attention failed with ``CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED``.
    A variable that the user has set stays. Call before the first import of Transformer Engine.
    """
    packages = _site_packages() / "nvidia"
    for library, folder in PACKAGED_LIBRARIES.items():
        if (packages / folder).is_dir():
            os.environ.setdefault(f"{library}_HOME", str(packages / folder))
    # Of cuDNN its core is linked to all parts, and the loader opens the first alone.
    cudnn = Path(os.environ.get("CUDNN_HOME", ""))
    if cudnn == packages / PACKAGED_LIBRARIES["CUDNN"]:
        for part in sorted(cudnn.glob("lib/lib*.so.*[0-9]")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


def import_error() -> str | None:
    """What importing Transformer Engine raises in this process; ``None``: it works."""
    use_packaged_libraries()
    try:
        # Before it: its core is linked to cuBLAS, which torch knows where to find.
        importlib.import_module("torch")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A missing symbol is an OSError, a wrong pair of versions an AssertionError.
        return f"importing it fails: {type(error).__name__}: {error}"
    return None


def hide() -> None:
    """Let this process see no Transformer Engine.

    Megatron looks for the top-level package alone, which imports although its extension does not.
    """
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    # What Python takes for a module that cannot be imported.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def refusal(problem: str) -> str:
    """The message for a run on CUDA that Transformer Engine's layers were meant for.

    Args:
        problem: From :func:`missing_part` or :func:`import_error`.
    """
    return (
        f"actor.layers: on CUDA the actor uses Transformer Engine's layers, but {problem}. Install "
        "it with `bash launchers/setup.sh cuda`, or set actor.layers=local to use Megatron's own. "
        "Those are slower and take more memory: unfused rotary embeddings that stall the GPU twice "
        "per layer, context-parallel attention that materializes its scores, experts multiplied in "
        "a loop, unfused accumulation of weight gradients, and unfused Adam."
    )


def _extension_in(package: Path) -> bool:
    """In the places where Transformer Engine's loader looks: beside, in, and below its package."""
    places = (package.parent, package, package / "wheel_lib")
    return any(path.suffix == ".so" for place in places for path in place.glob(f"{EXTENSION}*"))


def _site_packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
