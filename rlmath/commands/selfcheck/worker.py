"""The process of one check: ``python -m rlmath.commands.selfcheck.worker MODULE:FUNCTION NODE``.

Exit code 0: the check came to its end, whatever it found.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from rlmath.cluster.watchdog import write_stacks_on_signal
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record, phase_words
from rlmath.utils.child_processes import end_with_parent

RECORD_FILE = "record.jsonl"
LOG_FILE = "output.log"


def main(target: str, node: Node) -> int:
    """Run the check; its error becomes a problem of its record."""
    faulthandler.enable()
    write_stacks_on_signal()
    record = Record(Path(node.folder) / RECORD_FILE)
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(node, record)
    except BaseException as error:
        traceback.print_exc()
        record.fail(f"{type(error).__name__}{phase_words(record.open_phases)}: {error}")
        if not isinstance(error, Exception):
            raise
    record.end()
    return 0


if __name__ == "__main__":
    end_with_parent(os.getppid())
    sys.exit(main(sys.argv[1], Node(**json.loads(sys.argv[2]))))
