"""Whether Transformer Engine is installed, completely or in part. Does not import torch.

``find_spec`` also finds a Transformer Engine whose torch extension was never built. The fast check
searches for the extension like Transformer Engine's loader; the thorough one imports it.
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
# Libraries that it loads by name, each with its folder in the packages.
PACKAGED_LIBRARIES = {"CUDNN": "cudnn", "NVRTC": "cu13", "CURAND": "cu13"}
# Packages that its flash attention can use; the second is only for Hopper.
FLASH_ATTENTION_DISTRIBUTIONS = ("flash-attn", "flash-attn-3")


def missing_part() -> str | None:
    """The missing part of Transformer Engine, from files and metadata; ``None``: it is complete.

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
    # Without a distribution of the extension, it was built from source as a whole.
    if extension is not None and {extension} != {v for v in (main, *core) if v is not None}:
        return (
            f"its parts are of different versions: transformer-engine {main}, {EXTENSION} "
            f"{extension}, core {', '.join(v for v in core if v) or 'not installed'}"
        )
    return None


def has_flash_attention() -> bool:
    """Whether a package that Transformer Engine's flash attention uses is installed."""
    return any(_version(name) is not None for name in FLASH_ATTENTION_DISTRIBUTIONS)


def use_packaged_libraries() -> None:
    """Let Transformer Engine load the CUDA libraries that are installed as packages.

    Its loader searches below ``CUDNN_HOME`` (and so on), ``CUDA_HOME`` and ``/usr/local/cuda``
    before packages, and loads the first file of that name, of any version. Torch has already loaded
    the packages'. On a machine with cuDNN 9.14 in its CUDA toolkit, torch 2.13 then refused to
    continue, or fused attention failed with ``CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED``. A variable
    set by the user is kept. Call before the first import of Transformer Engine.
    """
    packages = _site_packages() / "nvidia"
    for library, folder in PACKAGED_LIBRARIES.items():
        if (packages / folder).is_dir():
            os.environ.setdefault(f"{library}_HOME", str(packages / folder))
    # cuDNN's core is linked to all its parts, but the loader opens only the first.
    cudnn = Path(os.environ.get("CUDNN_HOME", ""))
    if cudnn == packages / PACKAGED_LIBRARIES["CUDNN"]:
        for part in sorted(cudnn.glob("lib/lib*.so.*[0-9]")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


def import_error() -> str | None:
    """The error of importing Transformer Engine in this process; ``None`` if it works."""
    use_packaged_libraries()
    try:
        # First torch: Transformer Engine's core is linked to cuBLAS, which torch can find.
        importlib.import_module("torch")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A missing symbol is an OSError, a version mismatch an AssertionError.
        return f"importing it fails: {type(error).__name__}: {error}"
    return None


def hide() -> None:
    """Hide Transformer Engine from this process.

    Megatron checks only the top-level package, which imports even without its extension.
    """
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    # Python's marker of a module that cannot be imported.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def refusal(problem: str) -> str:
    """The error for a run on CUDA with Transformer Engine's layers. ``problem``: from
    :func:`missing_part` or :func:`import_error`."""
    return (
        f"actor.layers: on CUDA the actor uses Transformer Engine's layers, but {problem}. Install "
        "it with `bash launchers/setup.sh cuda`, or set actor.layers=local to use Megatron's own. "
        "Those are slower and take more memory: unfused rotary embeddings that stall the GPU twice "
        "per layer, context-parallel attention that materializes its scores, experts multiplied in "
        "a loop, unfused accumulation of weight gradients, and unfused Adam."
    )


def _extension_in(package: Path) -> bool:
    """Whether the extension is where Transformer Engine's loader searches for it."""
    places = (package.parent, package, package / "wheel_lib")
    return any(path.suffix == ".so" for place in places for path in place.glob(f"{EXTENSION}*"))


def _site_packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
