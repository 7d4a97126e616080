"""Transfer of experts between ranks that each need only a share of them.

A worker of an engine keeps a slice of each expert, or some experts. The rank that serves it (over
``ipc`` the one on its GPU, over ``nccl`` one that serves a worker of every engine) needs only this
share. It receives it from the ranks that have it, in one message from each, instead of by
broadcast.

A layer's experts are on the ranks of one pipeline stage, which send them to every engine. With
``n`` ranks in ``p`` stages and ``w`` workers per engine, ``n / p`` ranks send ``n / w`` copies of
the layer: ``p / w`` of a copy each, whatever the number of ranks. A broadcast brings one full copy
to each rank. Shares therefore pay off if an engine has more workers than the actor has stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmath.weights.runs import Run


@dataclass(frozen=True)
class ExpertShare:
    """An engine worker's share of the experts of each layer."""

    experts: frozenset[int] | None = None  # Global numbers of the experts; None: all of them.
    # Index of the part of each, along the rows of gate and up and the columns of down.
    part: int = 0
    parts: int = 1  # Number of equal parts of each expert.

    def fraction(self, num_experts: int) -> float:
        held = num_experts if self.experts is None else len(self.experts)
        return held / num_experts / self.parts

    def of(self, run: Run, expert: int, size: int) -> Run | None:
        """The part of a run of an expert's tensor that is in the share. ``run``: rows of gate or
        up, or columns of down. ``size``: rows or columns of the whole tensor."""
        if self.experts is not None and expert not in self.experts:
            return None
        each = size // self.parts
        return run.between(self.part * each, (self.part + 1) * each)

    def of_whole(self, name: str, dim: int, shape: Sequence[int], expert: int) -> Run | None:
        """The part of an expert's tensor that is in the share. ``dim``: dimension along which
        experts are split: 0 for gate and up, 1 for down. ``shape``: shape of the whole tensor."""
        return self.of(Run(name, dim, 0, tuple(shape)), expert, shape[dim])


NOTHING = ExpertShare(frozenset())


@dataclass(frozen=True)
class Need:
    share: ExpertShare
    node: str


def are_worth_it(needs: Iterable[Need], num_experts: int, layer_holders: int) -> bool:
    """Whether sharing sends less per rank than a broadcast. ``layer_holders``: ranks with experts
    of one layer."""
    return sum(need.share.fraction(num_experts) for need in needs) < layer_holders


@dataclass
class Exchange:
    """One rank's part of a transfer."""

    # Parts that it needs and has, each with the run that contains it.
    own: list[tuple[Run, Run]] = field(default_factory=list)
    # Messages, each with the destination ranks and its content, as in own.
    sends: list[tuple[tuple[int, ...], list[tuple[Run, Run]]]] = field(default_factory=list)
    # The parts in each message, in order, by source rank.
    receives: dict[int, list[Run]] = field(default_factory=dict)


class ExpertRoutes:
    """Routes of expert parts between ranks; each rank computes the same routes.

    Args:
        rank: Global rank of this process.
        needs: Need of each global rank, in the order of the group.
        experts: Expert of each expert tensor, by name.
        sizes: Shape of each whole tensor, by name.
        runs: The runs that tile each tensor, by name.
        holders: Ranks that have each run.
        alone: Ranks receive only their parts, instead of whole tensors with NaN elsewhere.
    """

    def __init__(
        self,
        rank: int,
        needs: Mapping[int, Need],
        experts: Mapping[str, int],
        sizes: Mapping[str, tuple[int, ...]],
        runs: Mapping[str, Sequence[Run]],
        holders: Mapping[Run, Sequence[int]],
        alone: bool = False,
    ) -> None:
        self.alone = alone  # The argument.
        self._rank = rank
        self._needs = needs
        self._place = {one: place for place, one in enumerate(needs)}
        self._experts = experts
        self._sizes = sizes
        self._runs = runs
        self._holders = holders
        self._sources: dict[tuple[tuple[int, ...], int], int] = {}
        self._found: dict[tuple[str, ...], Exchange] = {}
        self._sharing: dict[ExpertShare, list[int]] = {}
        for one, need in needs.items():
            self._sharing.setdefault(need.share, []).append(one)

    def __contains__(self, name: str) -> bool:
        return name in self._experts

    def exchange(self, names: Iterable[str]) -> Exchange:
        """This rank's part in the transfer of the expert tensors among ``names``; cached."""
        key = tuple(names)
        if key not in self._found:
            self._found[key] = self._plan(key)
        return self._found[key]

    def is_all_needed(self, name: str) -> bool:
        """Whether this rank needs the whole tensor."""
        share = self._needs[self._rank].share
        return all(self._part(run, share) == run for run in self._runs[name])

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Expert and split dimension of each expert tensor."""
        return {name: (expert, self._runs[name][0].dim) for name, expert in self._experts.items()}

    def own_part(self, name: str) -> Run | None:
        """The part of an expert's tensor that this rank needs; ``None``: nothing."""
        share, dim = self._needs[self._rank].share, self._runs[name][0].dim
        return share.of_whole(name, dim, self._sizes[name], self._experts[name])

    def source(self, run: Run, destination: int) -> int:
        """The source of a run's part for a rank: itself, else a rank on its machine, else any that
        has it, in turn."""
        key = tuple(self._holders[run]), destination
        if key not in self._sources:
            self._sources[key] = self._choose(*key)
        return self._sources[key]

    def _choose(self, holders: tuple[int, ...], destination: int) -> int:
        if destination in holders:
            return destination
        node = self._needs[destination].node
        among = [one for one in holders if self._needs[one].node == node] or holders
        return among[self._place[destination] % len(among)]

    def _part(self, run: Run, share: ExpertShare) -> Run | None:
        return share.of(run, self._experts[run.name], self._sizes[run.name][run.dim])

    def _plan(self, names: Sequence[str]) -> Exchange:
        found, me = Exchange(), self._rank
        share = self._needs[me].share
        outgoing: dict[int, list[tuple[Run, Run]]] = {}
        for run in (run for name in names if name in self for run in self._runs[name]):
            part = self._part(run, share)
            if part is not None:
                source = self.source(run, me)
                if source == me:
                    found.own.append((run, part))
                else:
                    found.receives.setdefault(source, []).append(part)
            if me not in self._holders[run]:
                continue
            for other, ranks in self._sharing.items():
                part = self._part(run, other)
                if part is None:
                    continue
                for rank in ranks:
                    if rank != me and self.source(run, rank) == me:
                        outgoing.setdefault(rank, []).append((run, part))
        alike: dict[tuple[tuple[Run, Run], ...], list[int]] = {}
        for rank, parts in sorted(outgoing.items()):
            alike.setdefault(tuple(parts), []).append(rank)
        found.sends = [(tuple(ranks), list(parts)) for parts, ranks in alike.items()]
        return found
