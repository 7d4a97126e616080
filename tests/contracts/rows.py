"""Tables of rows, ``rows/*.rows``: what is relied on in other libraries, in groups by what breaks.

A group begins with ``! what breaks``; further lines with ``!`` continue it. A row is a target, and
what is relied on of it: fields of ``Row`` with names behind them, or with a Python literal::

    ! CPU engines cannot schedule decode steps (rlmath/engines/patches/cpu_scheduler.py)
    vllm.v1.core.sched.scheduler:Scheduler has schedule, running
    vllm.v1.core.sched.scheduler:Scheduler.schedule passes throttle_prefills
        says "self.running"

Indented lines belong to the row above, and such without a field's name to the field above.
"""

import ast
from pathlib import Path

from tests.contracts.contract import Row

FOLDER = Path(__file__).with_name("rows")
NAMES = ("has", "takes", "passes", "fields", "all_fields")
LITERALS = ("equals", "says")


def read_rows(path):
    found = []
    breaks, is_open = "", False
    fields = []

    def finish():
        if found and fields:
            found[-1] = _with_fields(found[-1], fields)
        fields.clear()

    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split(maxsplit=1)
        if line.startswith("!"):
            breaks = f"{breaks} {line[2:]}" if is_open else line[2:]
            is_open = True
        elif words and not line.startswith("#"):
            is_open = False
            if line[0] != " ":
                finish()
                found.append(Row(words[0], breaks))
                line = words[1] if len(words) > 1 else ""
            name, _, rest = line.strip().partition(" ")
            if name in (*NAMES, *LITERALS):
                fields.append((name, rest))
            elif line.strip():
                fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line.strip()}")
    finish()
    return found


def _with_fields(row, fields):
    given = {"says": ()}
    for name, text in fields:
        if name in NAMES:
            given[name] = tuple(part.strip() for part in text.split(",") if part.strip())
        elif name == "says":
            given["says"] = (*given["says"], ast.literal_eval(text))
        else:
            given["equals"] = ast.literal_eval(text)
    return Row(row.target, row.breaks, **given)
