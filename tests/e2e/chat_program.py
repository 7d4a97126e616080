"""The console command with a chat in which a model that knows nothing calls a tool: how long its
turn is decides."""

import sys

from rlmath.cli import main
from rlmath.environments import chosen
from rlmath.environments.base import ToolCall
from rlmath.environments.chat_format import ChatFormat


class Lengths(ChatFormat):
    def calls(self, text):
        return [ToolCall("guess", {"number": len(text)})] if len(text) % 3 else None


chosen.ChatFormat = Lengths
sys.exit(main(sys.argv[1:]))
