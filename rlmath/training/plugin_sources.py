"""The hashes of a run's plug-ins, in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class PluginSources:
    """A part of the driver's state: which source files the steps so far were trained with.
    ``hashes``: ``plugin_hashes`` of the settings."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return lambda: dict(self._hashes)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Name the files that have changed: whoever resumes from a checkpoint by its name, or with
        ``runner.accept_changes``, has chosen so."""
        for name in sorted(state.keys() & self._hashes.keys()):
            if state[name] != self._hashes[name]:
                print(
                    f"the checkpoint was made with other source of {name}: {state[name]}, now "
                    f"{self._hashes[name]}",
                    flush=True,
                )
