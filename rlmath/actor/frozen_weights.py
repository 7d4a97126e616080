"""Checksums of a rank's tensors that training must not change: a frozen reference, and the base
model under LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rlmath.checkpoint.optimizer_prints import checksum

# Size of the weights checked per step: 20 ms of a host's memory bandwidth.
MIB_PER_STEP = 64


class FrozenWeights:
    """Checksums of tensors; each call compares some of them, in turn.

    Args:
        tensors: Names, and functions that return the current values: a reference's tensors are
            replaced in each pass (``exchange.py``).
        mib_per_step: Size compared per call, in MiB; at least one tensor.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Callable[[], Tensor]]],
        mib_per_step: float = MIB_PER_STEP,
    ) -> None:
        self._tensors, self._next = list(tensors), 0
        self._budget = mib_per_step * 2**20
        self._sums = [checksum(values()) for _, values in self._tensors]

    def find_changed(self) -> list[str]:
        """Names of the next tensors whose values have changed since construction."""
        found, left = [], self._budget
        for _ in range(len(self._tensors)):
            name, read = self._tensors[self._next]
            values = read()
            if checksum(values) != self._sums[self._next]:
                found.append(name)
            self._next = (self._next + 1) % len(self._tensors)
            left -= values.numel() * values.element_size()
            if left <= 0:
                break
        return found
