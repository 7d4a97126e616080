from __future__ import annotations

import importlib
import netrc
import os
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, TrackerTraits


@TRACKERS.register("wandb", traits=TrackerTraits("wandb"))
class WeightsAndBiases:
    """A run of ``wandb``, set up by variables (``WANDB_MODE``, ``WANDB_ENTITY``, ...).

    Without an API key and without ``WANDB_MODE`` it writes offline, to ``<run_dir>/wandb``, for
    ``wandb sync``: the client would ask at the terminal.
    """

    def __init__(self, run: TrackedRun) -> None:
        client: Any = importlib.import_module("wandb")
        id_ = run.id_of("wandb") or uuid.uuid4().hex[:8]
        mode = os.environ.get("WANDB_MODE") or (None if has_key() else "offline")
        self._run = client.init(
            project=run.project,
            name=run.name,
            id=id_,
            dir=str(run.folder),
            mode=mode,
            resume="allow",
            settings=client.Settings(console="off", silent=True),
        )
        run.keep_id("wandb", id_)
        # A step that is done again after a resume has its own line, with the same step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def has_key() -> bool:
    """Whether there is an API key, in ``WANDB_API_KEY`` or in the netrc file, as the client looks
    for it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return found.authenticators(urllib.parse.urlsplit(server).hostname or "") is not None
