"""Arrays that stay in the object store of the node that made them: the driver holds where they are.

A block is one int32 array that an engine's answer leaves in its node's store: of each sample its
token ids, and then the bits of its log-probs. Ranks are given the blocks themselves, by Ray; who
asks here for a few values gets them through the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Ray sends a return value below ``max_direct_call_object_size`` (100 KiB) to the caller.
LEAST_BLOCK_BYTES = 100 * 1024


@dataclass(frozen=True, eq=False)
class ArrayRef:
    """A piece of a block. ``numpy.asarray``, a loop and an index fetch it.

    Attributes:
        block: Ray's reference to the block; ``None`` until the driver has it.
        start: Its first item.
        length: Items.
        dtype: What their bits are.
    """

    block: Any
    start: int
    length: int
    dtype: str

    def __len__(self) -> int:
        return self.length

    def of(self, block: NDArray[np.int32]) -> NDArray[Any]:
        """The values, from their block; shares its memory."""
        return block[self.start : self.start + self.length].view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np
        import ray

        # Its own memory: a view would keep the block in the driver's store.
        found = self.of(ray.get(self.block)).copy()
        return found if dtype is None else np.asarray(found, dtype)

    def __getitem__(self, place: Any) -> Any:
        return self.tolist()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def tolist(self) -> list[Any]:
        """The values as Python's numbers."""
        found: list[Any] = self.__array__().tolist()
        return found
