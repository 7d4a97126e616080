"""All faults, in the order in which they are planted."""

from __future__ import annotations

from rlmath.commands.drill import (
    in_driver,
    in_engines,
    in_ranks,
    in_routers,
    in_samples,
    in_saves,
    in_update,
)
from rlmath.commands.drill.fault import Fault
from rlmath.errors import UserError
from rlmath.utils.close_names import did_you_mean

FAULTS: tuple[Fault, ...] = (
    *in_ranks.FAULTS,
    *in_samples.FAULTS,
    *in_update.FAULTS,
    *in_routers.FAULTS,
    *in_saves.FAULTS,
    *in_engines.FAULTS,
    *in_driver.FAULTS,
)


def select(names: str | None) -> list[Fault]:
    """The faults of a comma-separated list; all without one. Raises UserError: there is no such
    fault."""
    if names is None:
        return list(FAULTS)
    known = {fault.name: fault for fault in FAULTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"--only {name}: there is no such fault{hint} (--list names them)")
    return [fault for name, fault in known.items() if name in wanted]
