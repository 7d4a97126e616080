"""Arrays that stay in the object store of the node that made them: the driver holds where they are.

A block is one int32 array that an engine's answer leaves in its node's store: of each sample its
token ids, and then the bits of its log-probs. Ranks are given the blocks themselves, by Ray; who
asks here for a few values gets them through the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmath.errors import LostArrays

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ArrayRef:
    """A piece of a block. ``numpy.asarray``, a loop and an index fetch it.

    Attributes:
        block: Ray's reference to the block; ``None`` until the driver has it.
        start: Its first item.
        length: Items.
        dtype: What their bits are.
        origin: Whose they are, for messages: the sample, and the engine that made it.
    """

    block: Any
    start: int
    length: int
    dtype: str
    origin: str = ""

    def __len__(self) -> int:
        return self.length

    def of(self, block: NDArray[np.int32]) -> NDArray[Any]:
        """The values, from their block; shares its memory."""
        return block[self.start : self.start + self.length].view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The values, fetched.

        Raises:
            LostArrays: Their block is gone.
        """
        import numpy as np
        import ray
        from ray.exceptions import ObjectLostError

        try:
            block = ray.get(self.block)
        except ObjectLostError as error:
            raise lost_arrays([self.origin], error) from error
        # Its own memory: a view would keep the block in the driver's store.
        found = self.of(block).copy()
        return found if dtype is None else np.asarray(found, dtype)

    def __getitem__(self, place: Any) -> Any:
        return self.tolist()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def tolist(self) -> list[Any]:
        """The values as Python's numbers."""
        found: list[Any] = self.__array__().tolist()
        return found


class FetchedOnce(Sequence[Any]):
    """The values of a reference as Python's numbers, for code that expects a list: they are fetched
    when the first is read, and once.

    Args:
        ref: To the values.
    """

    def __init__(self, ref: ArrayRef) -> None:
        self._ref = ref
        self._values: list[Any] | None = None

    def _fetched(self) -> list[Any]:
        if self._values is None:
            self._values = self._ref.tolist()
        return self._values

    def __len__(self) -> int:
        return len(self._ref)

    def __getitem__(self, place: Any) -> Any:
        return self._fetched()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fetched())

    def __eq__(self, other: object) -> bool:
        return self._fetched() == (list(other) if isinstance(other, FetchedOnce) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._fetched())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np

        return np.array(self._fetched(), self._ref.dtype if dtype is None else dtype)

    def __reduce__(self) -> Any:
        # Another process has no way to the block.
        return list, (self._fetched(),)


# Samples that a message names.
MOST_NAMED = 4


def lost_arrays(origins: Sequence[str], error: BaseException) -> LostArrays:
    """The error for blocks that are gone.

    Args:
        origins: Whose arrays were in them, as far as it is known.
        error: What Ray said.
    """
    named = [one for one in dict.fromkeys(origins) if one]
    more = len(named) - MOST_NAMED
    whose = "; ".join(named[:MOST_NAMED]) + (f"; and of {more} more" if more > 0 else "")
    return LostArrays(
        f"rollout.arrays=engines: token ids and log-probs are lost ({type(error).__name__}): "
        f"{whose or 'of which samples is not known'}. The node that had them ended or its object "
        "store gave them up. Samples in the journal are not sampled again after a resume; with "
        "rollout.arrays=driver no step depends on the engines' nodes"
    )


def origins_of(arrays: Iterable[Any], error: BaseException) -> list[str]:
    """Whose arrays were in the block that Ray names in an error; all, if it names none.

    Args:
        arrays: Of which some are references.
        error: Of Ray.
    """
    refs = [one for one in arrays if isinstance(one, ArrayRef)]
    name = getattr(error, "object_ref_hex", None)
    own = [one.origin for one in refs if getattr(one.block, "hex", str)() == name]
    return own or [one.origin for one in refs]
