"""The reason of a failed call in one line, from Ray's error."""

from __future__ import annotations

from collections.abc import Sequence

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rlmath.cluster.logs import LINE_LENGTH

_NO_REASON = (RayActorError.BASE_ERROR_MSG, ActorDiedError.BASE_ERROR_MSG)
_ADDRESS = "\tip: "


def describe_failure(error: RayError) -> str:
    """The error that the called code raised, or Ray's report on its process. A process that Ray
    cannot reach may still run: only its connection is known to be lost."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, GetTimeoutError):
        return "it did not answer in time"
    lines = str(error).strip().splitlines()
    if isinstance(error, ActorUnavailableError):
        return f"Ray cannot reach its process, which may still run: {_in_one_line(lines)}"
    if not isinstance(error, RayActorError):
        return _in_one_line(lines)
    # Ray's lines about the actor are indented.
    address = next((line.removeprefix(_ADDRESS) for line in lines if line.startswith(_ADDRESS)), "")
    where = f" on {address}" if address else ""
    reason = [line for line in lines if line not in _NO_REASON and not line.startswith("\t")]
    if error.actor_init_failed:  # The other lines are its traceback.
        reason = reason[-1:]
    return f"its process ended{where}" + (f": {_in_one_line(reason)}" if reason else "")


def _in_one_line(lines: Sequence[str]) -> str:
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= LINE_LENGTH else text[:LINE_LENGTH] + " ..."
