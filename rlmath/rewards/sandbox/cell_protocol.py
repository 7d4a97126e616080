"""Messages between ``warm.py`` and a sandbox of ``cells.py``. Imports the standard library only.

A request is ``REQUEST`` and the code. A reply is ``REPLY``, then the first and the last part of the
output. A new sandbox first sends ``READY``, or text that says why there is none.
"""

import struct

RUN, KEEP, END = range(3)  # run and forget; run and keep the names; forget them
REQUEST = struct.Struct("<BI")  # kind, length of the code
# Status, flags, exit code, seconds, output's length, and how much of its start and end follow.
REPLY = struct.Struct("<BBidQII")
STATUSES = ("ok", "error", "timeout", "memory", "flood", "infrastructure")
CLEAN, ALIVE = 1, 2  # flags: nothing was left behind; the names are kept
READY = b"\xff"
