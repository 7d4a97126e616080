from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlmath.plugins.registry import Registry

_IDS_FILE = "trackers.json"


@dataclass(frozen=True)
class TrackedRun:
    """A run, or a part of it with its own metrics, such as its SFT.

    Attributes:
        last_step: The step of the checkpoint that it continues from; ``None``: it starts over.
    """

    folder: Path
    name: str
    project: str
    last_step: int | None = None

    def id_of(self, tracker: str) -> str | None:
        """The id that :meth:`keep_id` kept, if this run continues."""
        if self.last_step is None:
            return None
        found = self._ids().get(tracker)
        return str(found) if found else None

    def keep_id(self, tracker: str, id_: str) -> None:
        """Keep the id that a tracker knows this run by, for when it continues."""
        (self.folder / _IDS_FILE).write_text(json.dumps({**self._ids(), tracker: id_}) + "\n")

    def _ids(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / _IDS_FILE).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class TrackerTraits:
    """Properties of a tracker.

    Attributes:
        package: Package that it imports, as Python and pip call it; ``None``: none.
        inline: It is called in the thread of the run, as it is fast and needs no server; else in
            its own.
    """

    package: str | None = None
    inline: bool = False


class Tracker(Protocol):
    """One place to show metrics. Any method may raise; nothing is called after that.

    Made with a :class:`TrackedRun`, which may take seconds.
    """

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        """The run's settings.

        Args:
            text: All of them as YAML.
            values: All of them by full key.
            compared_by: Metrics that runs with other settings are compared by.
        """
        ...

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        """One step's metrics, some of which may not be finite, and texts by their tags."""
        ...

    def close(self) -> None:
        """Called at the end of the run."""
        ...


TRACKERS: Registry[Callable[[TrackedRun], Tracker], TrackerTraits] = Registry(
    "runner.trackers", TrackerTraits
)
