"""The interface of environments and tools.

An environment answers each turn of the model with an observation, which the model reads before its
next turn, or with the end of the episode. It sees tokens and text; how an observation becomes
tokens is the turn format's affair (:class:`TurnFormat`), so no history is rendered or tokenized
twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlmath.types import Problem

# ``error``: the call's own fault, which the model reads. ``refused``: a limit of the sample.
# ``infrastructure``: nothing is known about the call; never shown to the model.
CallStatus = Literal["ok", "error", "timeout", "memory", "refused", "infrastructure"]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str  # The tool's.
    arguments: dict[str, Any]  # By parameter name.


@dataclass(frozen=True)
class ToolResult:
    """The result of a call."""

    name: str  # The tool's.
    text: str  # For the model to read, already cut to the limit.
    status: CallStatus
    seconds: float = 0.0  # Wall time.


@dataclass(frozen=True)
class Turn:
    """The model's words in one turn."""

    number: int  # From 0.
    token_ids: Sequence[int]  # With the stop token if it was sampled.
    text: str  # Without special tokens.
    calls_before: int = 0  # Calls of earlier turns, where the episode is not given these.


@dataclass(frozen=True)
class Observation:
    """Results that the model reads before its next turn."""

    results: tuple[ToolResult, ...]  # One for each of the turn's calls, in their order; or a reply.
    is_reply: bool = False  # The one result is the environment's reply to a turn without calls.


@dataclass(frozen=True)
class End:
    """End of the episode."""

    reward: float | None = None  # The environment's; None: the run's rewards decide.


class Episode(ABC):
    """One sample's stay in an environment. Called from one thread at a time."""

    @abstractmethod
    def respond(self, turn: Turn) -> Observation | End:
        """Answer a turn; may take seconds. Raises InfrastructureError: nothing is known about the
        calls. The episode is closed, and the turn given to another a few times; then nothing grades
        the sample."""

    def reward(self) -> float | None:
        """The reward of the episode so far, when a limit of the sample ends it; may take seconds.
        Raises InfrastructureError: as :meth:`respond`."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release resources of the episode, also in the middle of it."""


class Environment(ABC):
    """Makes episodes. Thread-safe."""

    # Whether an answer depends on earlier turns of the episode. An episode that takes the place of
    # a lost one (after a failure, or in a resumed run) is then given these first, and its answers
    # to them are dropped.
    has_state: bool = True
    gives_reward: bool = False  # Whether Episode.reward is to be asked.

    @abstractmethod
    def begin(self, problem: Problem, sample: int) -> Episode:
        """The episode of a sample of a problem."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything."""


class TurnFormat(ABC):
    """How calls are written in a model's text, and how observations become tokens."""

    # Texts that end a turn, besides the model's end-of-sequence tokens: each an opening, which may
    # be empty, and what ends the turn after it.
    stop: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def calls(self, text: str) -> Sequence[ToolCall] | None:
        """The calls of a turn's text; ``None`` if it has none and the model has answered. Raises
        ValueError: the turn has calls that cannot be read; the message is for the model."""

    @abstractmethod
    def suffix(self, turn_text: str, results: Sequence[ToolResult]) -> Suffix:
        """The tokens that follow a turn with calls."""

    @abstractmethod
    def reply(self, turn_text: str, text: str) -> Suffix:
        """The tokens that follow a turn to which the environment replies."""


@dataclass(frozen=True)
class Suffix:
    """Tokens that follow a turn: glue, observation, glue."""

    token_ids: tuple[int, ...]
    observation: tuple[int, int]  # Its first place in them, and the first one after it.
