"""An endless, shuffled, resumable order of problems."""

from __future__ import annotations

import array
import copy
import hashlib
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rlmath.errors import UserError
from rlmath.types import Problem

log = logging.getLogger(__name__)


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_HasId)


class Stream(Protocol):
    def __len__(self) -> int: ...
    def __contains__(self, id_: str) -> bool: ...
    def __getitem__(self, id_: str) -> Problem: ...

    def next(self, k: int) -> list[Problem]: ...

    def snapshot(self, in_use: Collection[str] = ()) -> Callable[[], dict[str, Any]]:
        """The current position, to be encoded later; ``in_use``: ids of problems that a
        resumed run asks for."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ProblemStream(Generic[Item]):
    """Problems (or worked examples) epoch after epoch, each epoch in its own order.

    What comes after n problems depends on the seed, the problems and n alone, not on how many
    were asked for at a time: ``next(2)`` twice is ``next(4)``. A batch that goes over the end of
    an epoch may therefore hold a problem twice.
    """

    def __init__(self, items: Sequence[Item], seed: int = 0, shuffle: bool = True) -> None:
        """
        Args:
            items: At least one.
            shuffle: Shuffle each epoch again; otherwise every epoch has the order of ``items``.
        """
        if not items:
            raise ValueError("a stream needs at least one problem")
        self._items = list(items)
        self._seed = seed
        self._shuffle = shuffle
        self._taken = 0
        self._epoch_of_order = -1
        self._order: list[int] = []
        self._by_id = {item.id: item for item in self._items}
        digest = hashlib.sha256("\n".join(item.id for item in self._items).encode())
        self._fingerprint = digest.hexdigest()[:16]
        self._prompts = _digest_of_prompts(self._items)
        self._warned = False

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def epoch(self) -> float:
        return self._taken / len(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._by_id

    def __getitem__(self, id_: str) -> Item:
        return self._by_id[id_]

    def next(self, k: int) -> list[Item]:
        batch = []
        for _ in range(k):
            epoch, position = divmod(self._taken, len(self._items))
            if epoch != self._epoch_of_order:
                self._order = self._order_of(epoch)
                self._epoch_of_order = epoch
            batch.append(self._items[self._order[position]])
            self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON-able values, with a digest of the data and settings."""
        return {
            "taken": self._taken,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_problems": len(self._items),
            "fingerprint": self._fingerprint,
            "prompts": self._prompts,
        }

    def snapshot(self, in_use: Collection[str] = ()) -> Callable[[], dict[str, Any]]:
        """The current :meth:`state_dict`; all problems are at hand, used or not."""
        state = copy.deepcopy(self.state_dict())
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Raises UserError: it is a position in other data or in another
        order."""
        own = self.state_dict()
        if "source" in state:
            raise other_data("data.source", state["source"], "null")
        for key, setting in (
            ("num_problems", "the number of problems that data.train_paths gives"),
            ("fingerprint", "the fingerprint of the problems' files and rows"),
            ("seed", "data.seed"),
            ("shuffle", "data.shuffle"),
        ):
            if state[key] != own[key]:
                raise other_data(setting, state[key], own[key])
        if state.get("prompts", self._prompts) != self._prompts and not self._warned:
            self._warned = True
            log.warning(
                "the prompts are others than those that the checkpoint's steps were trained on, "
                "from the same rows: the chat template or tokenizer has changed, or has the date "
                "or the environment in it (data.template_date fixes the date)"
            )
        self._taken = int(state["taken"])

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def other_data(setting: str, before: object, now: object) -> UserError:
    """The error for a saved position in data that a setting has changed."""
    return UserError(
        f"the checkpoint's place in the data cannot be found again: {setting} was {before} and is "
        f"{now}; restore it, start over with runner.resume=never, or train the exported model on "
        "other data: model.path=.../hf with another runner.run_dir"
    )


def _digest_of_prompts(items: Sequence[Any]) -> str:
    """A digest of the prompts' token ids, as the model gets them."""
    digest = hashlib.sha256()
    for item in items:
        ids = array.array("q", getattr(item, "prompt_token_ids", ()))
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids)
    return digest.hexdigest()[:16]
