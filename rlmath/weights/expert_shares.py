"""Experts from rank to rank where each rank needs only a share of them.

A worker of an engine keeps a slice of each expert, or some experts. So the rank that serves it
(over ``ipc`` the one on its GPU, over ``nccl`` one that serves a worker of every engine) needs this
share and no more: it gets it from ranks that hold it, one message from each, and nothing is sent to
all.

A layer's experts are on the ranks of one pipeline stage, which send them to every engine. With
``n`` ranks in ``p`` stages and ``w`` workers in an engine, ``n / p`` ranks send ``n / w`` copies of
the layer: ``p / w`` of it each, whatever the number of ranks. A broadcast brings each rank all of
it once. So shares are for engines with more workers than the actor has stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmath.weights.runs import Run


@dataclass(frozen=True)
class ExpertShare:
    """What an engine's worker keeps of the experts of each layer.

    Attributes:
        experts: Their global numbers; ``None``: of all of them.
        part: Which part of each, by the rows of gate and up and the columns of down.
        parts: Into how many equal parts each is cut.
    """

    experts: frozenset[int] | None = None
    part: int = 0
    parts: int = 1

    def fraction(self, num_experts: int) -> float:
        """How much of all experts it is."""
        held = num_experts if self.experts is None else len(self.experts)
        return held / num_experts / self.parts

    def of(self, run: Run, expert: int, size: int) -> Run | None:
        """What of a run of an expert's tensor is in the share.

        Args:
            run: Rows of gate or up, or columns of down.
            expert: Whose tensor it is.
            size: Rows or columns of the whole tensor.
        """
        if self.experts is not None and expert not in self.experts:
            return None
        each = size // self.parts
        return run.between(self.part * each, (self.part + 1) * each)

    def of_whole(self, name: str, dim: int, shape: Sequence[int], expert: int) -> Run | None:
        """What of an expert's tensor is in the share.

        Args:
            name: The tensor.
            dim: Along which experts are cut: 0 for gate and up, 1 for down.
            shape: Of the whole.
            expert: Whose tensor it is.
        """
        return self.of(Run(name, dim, 0, tuple(shape)), expert, shape[dim])


NOTHING = ExpertShare(frozenset())


@dataclass(frozen=True)
class Need:
    """What a rank needs, and the machine that it is on."""

    share: ExpertShare
    node: str


def are_worth_it(needs: Iterable[Need], num_experts: int, layer_holders: int) -> bool:
    """Whether ranks send less by shares than a broadcast brings to each.

    Args:
        needs: Of all ranks.
        num_experts: Of a layer.
        layer_holders: Ranks that hold experts of one layer.
    """
    return sum(need.share.fraction(num_experts) for need in needs) < layer_holders


@dataclass
class Exchange:
    """A rank's part in moving some tensors.

    Attributes:
        own: Parts that it needs and holds, each with the run of which it is one.
        sends: Messages, each to the ranks that get the same; what is in it as in ``own``.
        receives: By the rank that sends it, the parts in a message, in their order.
    """

    own: list[tuple[Run, Run]] = field(default_factory=list)
    sends: list[tuple[tuple[int, ...], list[tuple[Run, Run]]]] = field(default_factory=list)
    receives: dict[int, list[Run]] = field(default_factory=dict)


class ExpertRoutes:
    """Who sends which part of which expert to whom, as each rank knows it for itself.

    Args:
        rank: This one's global number.
        needs: By global rank, in the order of the group.
        experts: By name of each expert's tensor, the expert.
        sizes: By name, the whole tensor's shape.
        runs: By name, the runs that tile it.
        holders: Of each run, the ranks that hold it.
        alone: Ranks are given their parts alone, and not whole tensors with NaN elsewhere.

    Attributes:
        alone: The same.
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
        self.alone = alone
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
        """Whether a tensor is an expert's."""
        return name in self._experts

    def exchange(self, names: Iterable[str]) -> Exchange:
        """This rank's part in moving the experts' tensors among these; the same at each call."""
        key = tuple(names)
        if key not in self._found:
            self._found[key] = self._planned(key)
        return self._found[key]

    def is_all_needed(self, name: str) -> bool:
        """Whether this rank needs all of a tensor."""
        share = self._needs[self._rank].share
        return all(self._part(run, share) == run for run in self._runs[name])

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Of each expert's tensor: the expert, and along which dimension experts are cut."""
        return {name: (expert, self._runs[name][0].dim) for name, expert in self._experts.items()}

    def own_part(self, name: str) -> Run | None:
        """What this rank needs of an expert's tensor; ``None``: nothing."""
        share, dim = self._needs[self._rank].share, self._runs[name][0].dim
        return share.of_whole(name, dim, self._sizes[name], self._experts[name])

    def source(self, run: Run, destination: int) -> int:
        """The rank that a rank gets a run's part from: itself, one of those on its machine, or one
        of all that hold it, which take turns."""
        key = tuple(self._holders[run]), destination
        if key not in self._sources:
            self._sources[key] = self._chosen(*key)
        return self._sources[key]

    def _chosen(self, holders: tuple[int, ...], destination: int) -> int:
        if destination in holders:
            return destination
        node = self._needs[destination].node
        among = [one for one in holders if self._needs[one].node == node] or holders
        return among[self._place[destination] % len(among)]

    def _part(self, run: Run, share: ExpertShare) -> Run | None:
        return share.of(run, self._experts[run.name], self._sizes[run.name][run.dim])

    def _planned(self, names: Sequence[str]) -> Exchange:
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
