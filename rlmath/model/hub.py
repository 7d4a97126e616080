"""Models of the Hugging Face hub by name: ``model.path=Qwen/Qwen3-8B``.

A name is looked up in the hub's cache first (``HF_HOME``), which needs no network. On a cluster the
cache must be on a file system that all nodes see under the same path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from rlmath.errors import UserError
from rlmath.model.folder import missing_model_files

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Name of a model's folder in the cache.
_CACHED = re.compile(r"models--(.+?)--(.+)")
# Common names of local folders. No organization of the hub has models under these names.
_FOLDERS = ("models", "model", "checkpoints", "runs", "outputs", "data")
ASK_TIMEOUT_S = 3.0
# Files needed by training, vLLM and export (some repositories have several copies of the weights).
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_OTHER_FILES = ["original/*", "onnx/*", "openvino/*"]


def is_hub_model(path: str) -> bool:
    """Whether a ``model.path`` names a model of the hub: ``ORGANIZATION/NAME``, if neither that
    folder nor a folder ``ORGANIZATION`` exists, and it is not a common folder (``models/NAME``)."""
    # Other rules of the hub for names (huggingface_hub's validate_repo_id).
    refused = any(part in path for part in ("--", "..")) or path.endswith((".git", ".", "-"))
    is_name = _NAME.fullmatch(path) is not None and not refused
    first = path.split("/")[0]
    return is_name and first not in _FOLDERS and not Path(first).exists()


def cached_model(name: str) -> Path | None:
    """Folder of a model that is complete in the cache; ``None``: it must be downloaded."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, local_files_only=True, allow_patterns=_FILES)
    except OSError:  # LocalEntryNotFoundError and unreadable folders.
        return None
    complete = (Path(folder) / "config.json").is_file() and not missing_model_files(folder)
    return Path(folder) if complete else None


class HubUnreachable(Exception):
    """The hub cannot be reached from here."""


def refusal(name: str, kind: Literal["model", "dataset"] = "model") -> str | None:
    """Why the hub would refuse a model or data set; ``None`` if it would not. Raises
    HubUnreachable: the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    hub = HfApi()
    try:
        found = hub.repo_info(name, repo_type=kind, timeout=ASK_TIMEOUT_S)
        if getattr(found, "gated", False):
            hub.auth_check(name, repo_type=kind)
    except GatedRepoError:
        return "it is gated: accept its terms on its page, then run hf auth login"
    except RepositoryNotFoundError:
        return f"the hub has no such {kind}, or it is private: hf auth login"
    except Exception as error:  # Each HTTP client has its own error for a missing network.
        raise HubUnreachable(
            (str(error).strip() or type(error).__name__).splitlines()[0]
        ) from error
    return None


def download_model(name: str) -> Path:
    """Download a model into the cache, with the hub's progress bars and token. Raises UserError:
    the hub is unreachable, has no such model, or requires a token."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES)
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        local = f"models/{name.rpartition('/')[2]}"
        raise UserError(
            f"model.path={name}: the model cannot be downloaded from the hub ({reason}). On a "
            f"machine with a network run\n  hf download {name} --local-dir {local}\nand give "
            f"model.path={local} here; a private or gated model needs hf auth login first"
        ) from error
    return Path(folder)


def local_model(path: str) -> Path:
    """Folder of a model: ``path`` itself, or a model of the hub, downloaded if missing. Raises
    UserError: it cannot be downloaded."""
    if not is_hub_model(path):
        return Path(path).expanduser()
    return cached_model(path) or download_model(path)


def hub_name(folder: str | Path) -> str | None:
    """``ORGANIZATION/NAME`` of a folder in the cache; ``None`` for other folders."""
    for part in Path(folder).parts:
        match = _CACHED.fullmatch(part)
        if match:
            return f"{match[1]}/{match[2]}"
    return None
