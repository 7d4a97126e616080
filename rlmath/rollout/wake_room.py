"""Whether engines may take memory for weights before the ranks have made all of their room."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.device.residue import Residue


class WakeRoom:
    """Lets engines wake beside ranks that still copy their optimizer to the host, if no GPU then
    holds more than it did in the step's update.

    What an engine takes is what it took of each rank's GPU in the last weight sync, its buffers
    among it: the first sync is in the strict order, first the copies and then the engines.

    Attributes:
        used: Whether the last weight sync overlapped them.
    """

    def __init__(self) -> None:
        self.used = False
        self._taken_bytes: list[int] | None = None

    def decide(self, asleep: Sequence[Residue]) -> bool:
        """Whether to overlap them, which ``used`` keeps.

        Args:
            asleep: Of each rank, with its optimizer, while the engines sleep.
        """
        self.used = bool(asleep) and self._fits(asleep)
        return self.used

    def see(self, asleep: Sequence[Residue], awake: Sequence[Residue]) -> None:
        """Measure what the engines took.

        Args:
            asleep: As for :meth:`decide`.
            awake: Of each rank, when the engines have their weights.
        """
        self._taken_bytes = [
            max(0, (after.others_bytes or 0) - (before.others_bytes or 0))
            for before, after in zip(asleep, awake, strict=True)
        ]

    def _fits(self, asleep: Sequence[Residue]) -> bool:
        if all(one.others_bytes is None for one in asleep):
            return True  # On CPU engines do not sleep, and take nothing.
        taken = self._taken_bytes
        return taken is not None and all(
            needed <= one.spare_bytes for one, needed in zip(asleep, taken, strict=True)
        )
