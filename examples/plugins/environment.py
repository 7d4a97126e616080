"""A game as an environment: find a number, which is the field ``answer`` of a row.

rlmath train ... rollout.environment=examples/plugins/environment.py:FindNumber \
    'reward.items=[{name: environment}]'
"""

from dataclasses import dataclass

from rlmath.config.environments import ENVIRONMENTS
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class FindNumberOptions(Options):
    guesses: int = setting(7, "Guesses of a sample.", least=1)


@ENVIRONMENTS.register("find_number", FindNumberOptions)
class FindNumber:
    def __init__(self, options):
        self._left, self._found = options.guesses, False

    def reset(self, answer="42"):
        self._number = int(answer)
        return f"You have {self._left} guesses."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self._left -= 1
        self._found |= self._left >= 0 and number == self._number
        return "right" if number == self._number else "more" if number < self._number else "less"

    def get_reward(self):
        return float(self._found)
