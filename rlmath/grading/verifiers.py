"""Answer verifiers, which decide in place of rlmath's comparison whether an answer is accepted.

``reward.verifier`` names one. It is called in the worker processes of the grader, under their
limits of time, memory and files, once for each pair of an answer and an accepted answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlmath.grading.settings import GradingSettings
from rlmath.plugins import PluginError, Registry

# (answer, accepted answer, options) -> whether it is accepted. Of an accepted answer with a box, it
# is what the box states.
Verifier = Callable[[str, str, Any], bool]


@dataclass(frozen=True)
class VerifierTraits:
    """Properties of a verifier."""

    # It is given the whole response, and not the answer that rlmath finds in it (in a box, or where
    # reward.fallback says).
    whole_response: bool = False


VERIFIERS: Registry[Verifier, VerifierTraits] = Registry("reward.verifier", VerifierTraits)


def verify(settings: GradingSettings, answer: str, gold: str) -> dict[str, Any]:
    """A worker's reply.

    Raises:
        PluginError: The verifier is not there, or returns something else than true or false.
    """
    assert settings.verifier is not None
    options = VERIFIERS.options(settings.verifier).of(settings.verifier_options)
    found = VERIFIERS.get(settings.verifier)(answer, gold, options)
    if not isinstance(found, bool):
        raise PluginError(
            f"reward.verifier={settings.verifier} returned {found!r}, and not true or false"
        )
    return {"verdict": found, "method": "verifier"}
