from __future__ import annotations

import importlib
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, TrackerTraits


@TRACKERS.register("swanlab", traits=TrackerTraits("swanlab"))
class SwanLab:
    """A run of ``swanlab``, set up by variables (``SWANLAB_MODE``, ``SWANLAB_WORKSPACE``, ...).

    Without an API key and without ``SWANLAB_MODE`` it writes offline, to ``<run_dir>/swanlog``, for
    ``swanlab sync``, since the client would prompt in the terminal.
    """

    def __init__(self, run: TrackedRun) -> None:
        client: Any = importlib.import_module("swanlab")
        id_ = run.id_of("swanlab") or uuid.uuid4().hex[:8]
        self._run = client.init(
            project=run.project,
            name=run.name,
            id=id_,
            log_dir=str(run.folder / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE") or (None if _has_key() else "offline"),
            resume="allow",
        )
        run.keep_id("swanlab", id_)

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        self._run.config.update(dict(values))

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    """Whether there is an API key, in ``SWANLAB_API_KEY`` or in the file of ``swanlab login``."""
    known = (os.environ.get(name) for name in ("SWANLAB_ROOT", "SWANLAB_SAVE_DIR"))
    folders = [Path(next(filter(None, known), Path.home() / ".swanlab")), Path(".swanlab")]
    is_logged_in = any((folder / ".netrc").is_file() for folder in folders)
    return bool(os.environ.get("SWANLAB_API_KEY")) or is_logged_in
