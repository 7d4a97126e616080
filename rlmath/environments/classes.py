"""A user's class as an environment: each sample has its own instance.

``reset(**row)`` begins a sample. The other public methods are tools, by TRL's interface, unless the
class has ``step(text)``, which replies to the model's turns. ``get_reward()`` gives the reward.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from rlmath.data.prompts import OPENING_GLUE
from rlmath.environments.base import End, Episode, Observation, ToolResult, Turn, TurnFormat
from rlmath.environments.functions import CallLimits, FunctionTool
from rlmath.environments.text import cut_bytes
from rlmath.environments.tools import Tool, ToolEnvironment, ToolEpisode, ToolSession
from rlmath.errors import ConfigError, InfrastructureError
from rlmath.rewards.columns import own_copy
from rlmath.types import Problem
from rlmath.utils.daemon_threads import DaemonThreads
from rlmath.utils.ending_signals import is_signal

log = logging.getLogger(__name__)

_OWN = ("reset", "step", "get_reward", "close")
# Instances that are closed at once.
_CLOSING = 16


class UserClass:
    """A user's class. Raises ConfigError: it cannot be made, has no ``reset``, or a method is no
    tool.

    Args:
        setting: Where the user named it, for messages.
        make: The class, or a function that makes an instance.
        limits: Limits of calls of its methods.
    """

    def __init__(self, setting: str, make: Callable[[], Any], limits: CallLimits) -> None:
        self.setting, self._make, self.limits = setting, make, limits
        # Whether reset returns text: known from the first row.
        self._opens: bool | None = None
        try:
            probe = make()
        except Exception as error:
            raise ConfigError(
                f"{setting}: {type(error).__name__} while making it: {error}"
            ) from error
        if not callable(getattr(probe, "reset", None)):
            raise ConfigError(f"{setting}: {type(probe).__name__} has no method reset(**row)")
        # Whether it replies to turns, and whether it knows the reward.
        self.replies = callable(getattr(probe, "step", None))
        self.gives_reward = self.replies or callable(getattr(probe, "get_reward", None))
        self.methods = [
            FunctionTool(f"{setting}.{name}", getattr(probe, name), limits)
            for name, _ in inspect.getmembers(type(probe), inspect.isfunction)
            if not (self.replies or name.startswith("_") or name in _OWN)
        ]
        if not self.methods and not self.gives_reward:
            raise ConfigError(f"{setting}: {type(probe).__name__} has no public method, so no tool")
        with suppress(InfrastructureError):  # It has had no reset.
            self._close(probe)

    def begin(self, row: Mapping[str, Any]) -> tuple[Any, str | None]:
        """A new instance, and what its ``reset`` returned. Raises InfrastructureError: it raised an
        error, did not return, or returned something else."""
        instance = self.call("making it", self._make)
        try:
            said = self.call("reset", instance.reset, **_accepted_fields(instance.reset, row))
            if said is not None and not isinstance(said, str):
                kind = type(said).__name__
                text = f"{self.setting}: reset returned {kind}, not text or None"
                raise InfrastructureError(text)
        except InfrastructureError:
            self.close(instance)
            raise
        return instance, said or None

    def opening(self, row: Mapping[str, Any]) -> str | None:
        """Text that ``reset`` adds to the prompt of a row. An environment that adds nothing to the
        first one is not asked again. Raises ConfigError: as :meth:`begin`."""
        if self._opens is False:
            return None
        try:
            instance, said = self.begin(row)
            self._close(instance)
        except InfrastructureError as error:
            raise ConfigError(str(error)) from error
        self._opens = self._opens or said is not None
        return said

    def call(self, what: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a method of the instance that is no tool, within the limits. Raises
        InfrastructureError: it raised an error, or did not return."""
        place = f"{self.setting}: {what}"
        try:
            return self.limits.call(place, lambda: function(*given, **named), {})
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or is_signal(error):
                raise
            text = f"{self.setting}: {type(error).__name__} in {what}: {error}"
            raise InfrastructureError(text) from error

    def number(self, value: Any) -> float:
        """A reward as a number. Raises InfrastructureError: it is no number, or not finite."""
        try:
            found = float(value)
        except (TypeError, ValueError) as error:
            raise InfrastructureError(f"{self.setting}: the reward is {value!r}") from error
        if not math.isfinite(found):
            raise InfrastructureError(f"{self.setting}: the reward is {found}")
        return found

    def close(self, instance: Any) -> None:
        """Close an instance; its errors are logged."""
        try:
            self._close(instance)
        except InfrastructureError as error:
            log.warning("%s", error)

    def _close(self, instance: Any) -> None:
        if callable(getattr(instance, "close", None)):
            self.call("close", instance.close)


class ClassEnvironment(ToolEnvironment):
    """A user's class as an environment. ``tools``: further ones, beside the methods."""

    def __init__(
        self, made_of: UserClass, turn_format: TurnFormat, tools: Sequence[Tool], max_calls: int
    ) -> None:
        super().__init__(turn_format, tools, max_calls)
        self._class, self.has_state, self.gives_reward = made_of, True, made_of.gives_reward
        # Closing an instance may take its time: sampling does not wait for it.
        self._threads = DaemonThreads(_CLOSING, "closing")
        self._closing: set[Future[None]] = set()

    def begin(self, problem: Problem, sample: int) -> Episode:
        instance, said = self._class.begin(problem.columns)
        prompt = problem.messages[-1]["content"] if problem.messages else problem.prompt
        if said is not None and not prompt.endswith(OPENING_GLUE + said):
            self._class.close(instance)
            raise ConfigError(
                f"{self._class.setting}: reset returned {said[:200]!r}, which the prompt of "
                f"{problem.id} does not end with; it has to return the same for each sample of a "
                "row, and text for the first row if for any"
            )
        sessions = {tool.name: tool.begin() for tool in self._tools}
        sessions |= {one.name: one.bind(instance) for one in self._class.methods}
        return _ClassEpisode(self, instance, sessions)

    def close_instance(self, instance: Any) -> None:
        """Close an instance, without waiting for it."""
        if not hasattr(instance, "close"):
            return
        try:
            closing = self._threads.submit(self._class.close, instance)
        except RuntimeError:  # The run ends.
            self._class.close(instance)
            return
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        wait(list(self._closing), self._class.limits.timeout_s)
        self._threads.close()
        super().close()


class _ClassEpisode(ToolEpisode):
    def __init__(
        self, own: ClassEnvironment, instance: Any, sessions: Mapping[str, ToolSession]
    ) -> None:
        super().__init__(own._format, sessions, own._max_calls)
        self._class, self._instance = own._class, instance
        self._close, self._to_close = own.close_instance, [instance]
        self._total = 0.0  # reward of the steps so far

    def answer(self, turn: Turn) -> Observation | End:
        if not self._class.replies:
            return End(self.reward())
        began_s = time.monotonic()
        found = self._class.call("step", self._instance.step, turn.text)
        try:
            said, reward, is_done = found
        except (TypeError, ValueError) as error:
            raise InfrastructureError(
                f"{self._class.setting}: step returned {found!r}; it returns a reply, a reward, "
                "and whether the episode is over"
            ) from error
        self._total += self._class.number(reward)
        if is_done:
            return End(self.reward())
        text = cut_bytes(str(said).encode("utf-8", "replace"), self._class.limits.output_bytes)
        result = ToolResult("step", text, "ok", time.monotonic() - began_s)
        return Observation((result,), is_reply=True)

    def reward(self) -> float | None:
        if not callable(getattr(self._instance, "get_reward", None)):
            return self._total if self._class.replies else None
        value = self._class.call("get_reward", self._instance.get_reward)
        return None if value is None else self._class.number(value)

    def close(self) -> None:
        super().close()
        with suppress(IndexError):  # It was closed before, maybe by another thread.
            self._close(self._to_close.pop())


def _accepted_fields(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's fields that a function takes, which it may change."""
    own: dict[str, Any] = own_copy(dict(row))
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return own
    return {name: value for name, value in own.items() if name in parameters}
