"""The console command with a format in which a model that knows nothing calls Python: an odd digit
ends its turn, and the program prints something of the turn."""

import sys

from rlmath.cli import main
from rlmath.environments import chosen
from rlmath.environments.base import ToolCall
from rlmath.environments.fenced import Fenced

ODD = "13579"


class Digits(Fenced):
    @property
    def stop(self):
        return tuple(("", digit) for digit in ODD)

    def calls(self, text):
        if not text or text[-1] not in ODD:
            return None
        return [ToolCall("python", {"code": f"print(len({text!r}) % 7)"})]


chosen.Fenced = Digits
sys.exit(main(sys.argv[1:]))
