"""Messages between ``warm.py`` and a sandbox of ``cells.py``. Imports the standard library only.

A request is ``REQUEST`` and the code. A reply is ``REPLY``, then the output. A new sandbox first
sends ``READY``, or text that says why there is none.
"""

import struct

RUN, KEEP, END = range(3)  # run and forget; run and keep the names; forget them
REQUEST = struct.Struct("<BI")  # kind, length of the code
# Status, whether the names are kept, exit code, seconds, length of the output. After a call whose
# names are not kept, one byte says whether the sandbox is clean.
REPLY = struct.Struct("<B?idI")
STATUSES = ("ok", "error", "timeout", "memory", "flood", "infrastructure")
READY = b"\xff"
