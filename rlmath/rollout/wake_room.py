"""Decides whether engines may allocate weights before the ranks have freed all their memory."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.device.residue import Residue


class WakeRoom:
    """Lets engines wake while ranks still copy their optimizer to the host, if no GPU then uses
    more memory than in the step's update.

    The engines' need is measured as the memory that they took of each rank's GPU in the last weight
    sync, including buffers. The first sync is therefore sequential: first the copies, then the
    engines. ``used``: whether they overlapped in the last weight sync.
    """

    def __init__(self) -> None:
        self.used = False
        self._taken_bytes: list[int] | None = None

    def decide(self, asleep: Sequence[Residue]) -> bool:
        """Decide whether to overlap; the result is kept in ``used``. ``asleep``: memory of each
        rank, with its optimizer, while the engines sleep."""
        self.used = bool(asleep) and self._fits(asleep)
        return self.used

    def update(self, asleep: Sequence[Residue], awake: Sequence[Residue]) -> None:
        """Measure the memory that the engines took. ``asleep``: as for :meth:`decide`. ``awake``:
        memory of each rank when the engines have their weights."""
        self._taken_bytes = [
            max(0, (after.others_bytes or 0) - (before.others_bytes or 0))
            for before, after in zip(asleep, awake, strict=True)
        ]

    def _fits(self, asleep: Sequence[Residue]) -> bool:
        if all(one.others_bytes is None for one in asleep):
            return True  # On CPU engines do not sleep and need no memory.
        taken = self._taken_bytes
        return taken is not None and all(
            needed <= one.spare_bytes for one, needed in zip(asleep, taken, strict=True)
        )
