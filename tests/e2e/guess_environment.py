"""An environment whose reward is the number of calls that it had."""


class Guess:
    def reset(self, solutions):
        self.calls, self.solutions = 0, solutions
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The guess.
        """
        self.calls += 1
        return f"{number} is not {self.solutions[0]}"

    def get_reward(self):
        return float(self.calls)
