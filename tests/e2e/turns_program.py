"""The console command with a format in which a model that knows nothing calls Python: an odd digit
ends its turn, and the program prints a number of the turn, in a session one of all its turns."""

import sys

from rlmath.cli import main
from rlmath.environments import chosen
from rlmath.environments.base import ToolCall
from rlmath.environments.fenced import Fenced

ODD = "13579"


class Digits(Fenced):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stop = tuple(("", digit) for digit in ODD)

    def calls(self, text):
        if not text or text[-1] not in ODD:
            return None
        code = f"n = globals().get('n', 0) + len({text!r})\nprint(n % 7)"
        return [ToolCall("python", {"code": code})]


chosen.Fenced = Digits
sys.exit(main(sys.argv[1:]))
