"""All faults, in the order in which they are planted."""

from __future__ import annotations

import difflib

from rlmath.commands.drill import in_driver, in_engines, in_ranks, in_training
from rlmath.commands.drill.fault import Fault
from rlmath.errors import UserError

FAULTS: tuple[Fault, ...] = (
    *in_ranks.FAULTS,
    *in_training.FAULTS,
    *in_engines.FAULTS,
    *in_driver.FAULTS,
)


def select(names: str | None) -> list[Fault]:
    """The faults of a comma-separated list; all without one.

    Raises:
        UserError: There is no such fault.
    """
    if names is None:
        return list(FAULTS)
    known = {fault.name: fault for fault in FAULTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"--only {name}: there is no such fault{hint} (--list names them)")
    return [fault for name, fault in known.items() if name in wanted]
