"""Environments and turn formats that need no tool."""

import threading

from rlmath.environments.base import (
    End,
    Environment,
    Episode,
    Observation,
    Suffix,
    ToolResult,
    TurnFormat,
)
from rlmath.errors import InfrastructureError
from rlmath.rollout.episodes import Episodes


class Letters(TurnFormat):
    """Each of these letters ends a turn; an observation is a fixed text of bytes, or nothing."""

    def __init__(self, letters="etaoinshrdlu", glue=(), observation=()):
        self._letters, self._glue, self._observation = letters, glue, observation

    @property
    def stop(self):
        return tuple(("", letter) for letter in self._letters)

    def calls(self, text):
        return None

    def reply(self, turn_text, text):
        return self.suffix(turn_text, ())

    def suffix(self, turn_text, results):
        tokens = (*self._glue, *self._observation, *self._glue)
        start = len(self._glue)
        return Suffix(tokens, (start, start + len(self._observation)))


class Scripted(Environment):
    """Answers as a function of the turn and the turns before says; keeps what it was asked.

    Args:
        answer: Gets the turns of the episode so far; returns text, ``End``, or raises.
    """

    def __init__(self, answer, has_state=True):
        self.answer, self.has_state = answer, has_state
        self.asked, self.begun, self.closed = [], 0, 0
        self.lock = threading.Lock()

    def begin(self, problem, sample):
        with self.lock:
            self.begun += 1
        return _Script(self)


class _Script(Episode):
    def __init__(self, own):
        self.own, self.turns = own, []

    def respond(self, turn):
        with self.own.lock:
            self.own.asked.append(turn)
        self.turns.append(turn)
        said = self.own.answer(self.turns)
        return said if isinstance(said, End) else Observation((ToolResult("t", said, "ok", 0.1),))

    def reward(self):
        return float(len(self.turns)) if self.own.gives_reward else None

    def close(self):
        with self.own.lock:
            self.own.closed += 1


def end_at(token):
    """Nothing to say, until a turn ends with this token."""
    return lambda turns: End() if turns[-1].token_ids[-1] == token else ""


def raise_broken(turns):
    raise InfrastructureError("the sandbox is gone")


def make_episodes(environment, turn_format, *, max_turns=1000, wall_s=60.0, parallel=2):
    def decode(ids):
        return "".join(chr(one) for one in ids)

    given = (environment, turn_format, decode)
    return Episodes(*given, max_turns=max_turns, wall_s=wall_s, parallel=parallel)
