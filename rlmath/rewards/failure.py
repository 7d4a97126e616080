"""The error message for a reward that raised: location, samples and available columns."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmath.rewards.base import RewardError

_PACKAGE = Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(_PATHS[name] for name in ("stdlib", "purelib", "platlib"))


def reward_error(
    label: str, error: BaseException, count: int, columns: Mapping[str, Any]
) -> RewardError:
    text = f"reward {label}: {type(error).__name__}: {error}"
    place = _place(error)
    if place is not None:
        name = f" in {place.name}" if place.name != "<module>" else ""
        text += f"\n  at {place.filename}:{place.lineno}{name}: {place.line}"
    scored = "1 completion" if count == 1 else f"{count} completions"
    ids = list(dict.fromkeys(columns.get("problem_id") or ()))
    if ids:
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        scored += f" of problem {', '.join(map(str, ids[:3]))}{more}"
    text += f"\n  while it scored {scored}; its columns are completions, " + ", ".join(
        sorted(columns)
    )
    return RewardError(
        text + "\n  Fix the reward and start the run again, with runner.accept_changes="
        "[plugin_hashes] as its source differs then: it resumes after the last finished step. "
        "reward.on_error=skip counts such samples as unscored instead."
    )


def _place(error: BaseException) -> traceback.FrameSummary | None:
    """The line of the user's file that raised, or that called what raised.

    The first frames are rlmath's; those of event loops and libraries may follow. For a reward of
    rlmath, the last frame.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [
        frame
        for frame in frames
        if _PACKAGE not in Path(frame.filename).resolve().parents
        and not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    return next(reversed(own or frames), None)
