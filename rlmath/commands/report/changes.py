"""Changes at the end of a run: the last window of steps against the one before."""

from __future__ import annotations

from typing import Any

from rlmath.commands.explain.outcomes import read_window
from rlmath.commands.explain.shares import METRICS, explain
from rlmath.commands.explain.text import as_json
from rlmath.errors import UserError
from rlmath.monitor.run_folder import RunFolder

MAX_WINDOW = 50  # files of samples in each window


def changes_of(
    run: RunFolder, later: range | None = None, earlier: range | None = None
) -> list[dict[str, Any]]:
    """Explanations of reward, accuracy and length, as JSON values; those that have values. Raises
    UserError: a window that was given has no samples.

    Args:
        later: The later window; ``None``: the last steps with samples, at most half of them.
        earlier: The window to compare with; ``None``: what comes before.
    """
    if later is None:
        steps = list(run.training_steps)
        size = min(MAX_WINDOW, len(steps) // 2)
        if not size:
            return []
        later = range(steps[-size], steps[-1] + 1)
        earlier = range(steps[-2 * size], steps[-size])
    assert earlier is not None
    windows = read_window(run, earlier), read_window(run, later)
    found = []
    for metric in METRICS:
        try:
            found.append(as_json(explain(*windows, metric), earlier, later))
        except UserError:  # Nothing was graded, or nothing has a reward.
            continue
    return found
