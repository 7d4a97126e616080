"""Gather Megatron shards to whole Hugging Face tensors, bucket by bucket.

The ranks exchange once which runs of which tensors they have. From that every rank derives the same
list of buckets and, for each bucket, who sends which bytes. A byte is sent once, from a rank that
has it to the rank that wants it; layouts (tensor, pipeline with virtual or uneven stages, expert)
need no special cases.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.checkpoint.state import free_group
from rlmath.config.weights import BUCKET_MIB
from rlmath.errors import WeightsError
from rlmath.model.lora import Lora, adapter_shapes
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.adapters import local_adapters
from rlmath.weights.buckets import Bucket, TensorMeta, align, cut_into_buckets, view_in_buffer
from rlmath.weights.expert_shares import ExpertRoutes, ExpertShare, Need, are_worth_it
from rlmath.weights.parameters import local_parameters
from rlmath.weights.pieces import expert_tensors, hf_shapes
from rlmath.weights.runs import Run
from rlmath.weights.slices import WeightSlice, fingerprint_in

# (parameter, some of its rows or columns, their dimension, the first index) -> values to send
Merge = Callable[[Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class WeightChanges:
    """A rank's report on its weights after an update."""

    # Fingerprints of whole tensors; the same on all ranks of a copy of the model.
    fingerprints: dict[str, int]
    # This rank's parts that have not changed since the last call; None at the first call.
    unchanged: tuple[Run, ...] | None
    # Description of a difference between ranks that should have the same values; empty if there is
    # none.
    drifted: str = ""


@dataclass(frozen=True)
class _Place:
    """Location of a run on this rank.

    It references the parameter instead of its memory: Megatron's distributed optimizer moves
    parameters to its own buffers, and memory saving may move them temporarily.
    """

    parameter: Tensor
    dim: int
    start: int
    length: int

    read: Callable[[Tensor], Tensor] | None = None
    merge: Merge | None = None

    def values(self) -> Tensor:
        values = self.parameter.detach()
        if self.read is not None:
            values = self.read(values)
        values = values.narrow(self.dim, self.start, self.length)
        if self.merge is not None:
            values = self.merge(self.parameter, values, self.dim, self.start)
        return values


class BucketGatherer:
    """Gathers tensors by the ranks' agreement on the runs that each has.

    Construction is collective over ``parallel.group``. The object references the parameters and
    reads their values at each ``gather``, so one object serves a whole run. Raises WeightsError: a
    parameter is unknown, or no rank has some part of a tensor.

    Args:
        model_chunks: ``GPTModel``s of this stage, one per virtual stage, bare or wrapped.
        bucket_size_mib: As in ``cut_into_buckets``.
        dtype: Type to send; ``None``: each parameter's own.
        read: Returns the values of a parameter that is not on the device, from host memory;
            ``None``: all are on the device.
        merge: Computes the values sent for an adapted parameter; ``None``: the parameter itself.
        adapters: Gather these instead of the model's tensors.

    Attributes:
        tensors: Name, shape and type of each Hugging Face tensor, in the order of sending.
        buckets: The same tensors in buckets; equal on all ranks.
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        spec: ModelSpec,
        parallel: ParallelRank,
        bucket_size_mib: float = BUCKET_MIB,
        dtype: torch.dtype | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
        merge: Merge | None = None,
        adapters: Lora | None = None,
    ) -> None:
        self.parallel = parallel
        self.ranks = parallel.global_ranks
        self._experts = {} if adapters is not None else expert_tensors(spec)
        self._before: dict[Run, int] | None = None
        self._local: dict[Run, _Place] = {}
        # A tied embedding's copy on the last stage; the first stage sends the original.
        self._copies: dict[Run, _Place] = {}
        if adapters is None:
            shapes, parameters = hf_shapes(spec), local_parameters(model_chunks, spec, parallel)
        else:
            shapes = dict(adapter_shapes(spec, adapters))
            parameters = local_adapters(model_chunks, spec, parallel, adapters)
        self.device = next(iter(model_chunks[0].parameters())).device
        for parameter in parameters:
            into = self._copies if parameter.is_copy else self._local
            for piece in parameter.layout.pieces:
                place = _Place(
                    parameter.tensor, piece.dim, piece.local_start, piece.length, read, merge
                )
                size = list(parameter.tensor.shape)
                size[piece.dim] = piece.length
                into[Run(piece.hf_name, piece.dim, piece.hf_start, tuple(size))] = place
        holders = self._exchange(dtype)
        self._holders = {run: ranks for run, (ranks, _) in holders.items()}
        self._runs = _runs_by_tensor(shapes, holders)
        self.tensors = [
            TensorMeta(name, whole, holders[self._runs[name][0]][1])
            for name, whole in shapes.items()
        ]
        self._bucket_size_mib = bucket_size_mib
        self.buckets = cut_into_buckets(self.tensors, bucket_size_mib)

    def _exchange(self, dtype: torch.dtype | None) -> dict[Run, tuple[list[int], torch.dtype]]:
        """Global ranks that have each run, ascending, and the type in which it is sent.

        Also records the runs that several ranks should have in common.
        """
        offered = {run: dtype or place.parameter.dtype for run, place in self._local.items()}
        everyone = [offered]
        copied = [set(self._copies)]
        if self.parallel.group is not None:
            everyone = [{} for _ in self.ranks]
            dist.all_gather_object(everyone, offered, group=self.parallel.group)
            copied = [set() for _ in self.ranks]
            dist.all_gather_object(copied, set(self._copies), group=self.parallel.group)
        holders: dict[Run, tuple[list[int], torch.dtype]] = {}
        for rank, of_rank in sorted(zip(self.ranks, everyone, strict=True), key=lambda x: x[0]):
            for run, kind in of_rank.items():
                holders.setdefault(run, ([], kind))[0].append(rank)
        self._replicated = {run for run, (ranks, _) in holders.items() if len(ranks) > 1}
        self._replicated.update(*copied)
        return holders

    def expert_routes(self, share: ExpertShare, alone: bool = False) -> ExpertRoutes | None:
        """Routes by which each rank gets a share of the experts instead of all. Collective. Returns
        for :meth:`gather`. ``None`` if the model has no experts, or if ranks read whole tensors and
        a broadcast takes no longer.

        Args:
            share: The share that this rank needs.
            alone: Ranks receive only their parts, instead of whole tensors with NaN elsewhere.
        """
        if self.parallel.group is None:
            return None
        everyone: list[Need | None] = [None for _ in self.ranks]
        need = Need(share, os.uname().nodename)
        dist.all_gather_object(everyone, need, group=self.parallel.group)
        needs = {rank: one for rank, one in zip(self.ranks, everyone, strict=True) if one}
        if not self._experts:
            return None
        # All layers are distributed alike.
        layer = next(iter(self._experts)).partition(".experts.")[0]
        names = [name for name in self._experts if name.startswith(f"{layer}.experts.")]
        holders = {one for name in names for run in self._runs[name] for one in self._holders[run]}
        num_experts = 1 + max(self._experts.values())
        if not alone and not are_worth_it(needs.values(), num_experts, len(holders)):
            return None
        return ExpertRoutes(
            self.parallel.global_rank,
            needs,
            self._experts,
            {meta.name: meta.shape for meta in self.tensors},
            self._runs,
            self._holders,
            alone,
        )

    def gather(
        self,
        destination: int | None,
        routes: ExpertRoutes | None = None,
        names: Collection[str] | None = None,
        keeps: bool = True,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Gather all buckets as Hugging Face tensors, in model order.

        Collective over ``parallel.group``: every rank must iterate to the end. Ranks other than the
        destination, and those that keep nothing, get an empty list per bucket. The caller owns the
        tensors: they are not views of parameters.

        Args:
            destination: Global rank that gets the tensors; ``None``: all ranks of the group.
            routes: Without ``destination``: each rank gets its share of the experts. Their tensors
                have their whole shape, with NaN where this rank needs nothing; or, with
                ``routes.alone``, the shape of this rank's part, and are left out if it has none.
            names: Only these tensors, the same on all ranks; ``None``: all.
            keeps: Without ``destination``: whether this rank wants tensors. If not, it has memory
                for messages only.
        """
        if destination is not None and destination not in self.ranks:
            # The rank in another copy of the model (data parallel) serves it.
            return
        buckets = self.buckets
        if names is not None:
            metas = [meta for meta in self.tensors if meta.name in names]
            buckets = cut_into_buckets(metas, self._bucket_size_mib)
        following = iter(buckets)
        pending = self._begin(next(following), destination, routes, keeps)
        while pending is not None:
            # Messages are freed before the next ones start, and a bucket when the caller drops it:
            # ``rlmath.engines.transport`` relies on both.
            finished = [pending.finish()]
            bucket = next(following, None)
            pending = None if bucket is None else self._begin(bucket, destination, routes, keeps)
            yield finished.pop()

    def gather_to_writer(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Gather all buckets to global rank 0, while all ranks, those of other copies of the model
        too, wait for it at each bucket.

        Rank 0 may take as long as it wants for writing them all: ranks that ran ahead would wait in
        NCCL, which ends their processes (``Platform.collective_timeout_s``).
        """
        arriving = self.gather(0)
        for _ in self.buckets:
            yield next(arriving, [])
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait over gloo for all ranks, of other copies of the model too."""
        if self.parallel.group is not None:
            dist.barrier(group=free_group())

    @torch.no_grad()
    def write_local(self, bucket: Bucket, buffer: Tensor) -> None:
        """Write this rank's part of a bucket into a flat buffer that ranks share.

        Every byte of the tensors is written by exactly one rank of the group, so after a barrier
        the buffer contains whole tensors. For ranks on one machine with ``buffer`` in shared memory
        this is the fastest way: one copy per byte and no messages.

        Args:
            bucket: One of ``buckets``.
            buffer: uint8, contiguous, at least ``bucket.num_bytes`` long.
        """
        for tensor in bucket.tensors:
            whole = view_in_buffer(buffer, tensor)
            for run in self._runs[tensor.meta.name]:
                if self._holders[run][0] == self.parallel.global_rank:
                    run.of(whole).copy_(self._local[run].values())

    @torch.no_grad()
    def fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        """Fingerprints of all tensors as they would be sent, from the ranks' own shards.

        Collective over the group; all ranks get the same (see ``rlmath.weights.fingerprint``).
        ``part``: only this slice, the same on all ranks; ``None``: everything.
        """
        found = self._add_up(self._own_fingerprints(self._is_sender, part))
        return found if part is None else {name: found[name] for name in found if name in part}

    @torch.no_grad()
    def changes(self) -> WeightChanges:
        """Fingerprints, and this rank's parts that have not changed since the last call. Collective
        over the group.
        """
        own = self._own_fingerprints(lambda run: run in self._local)
        before, self._before = self._before, own
        unchanged = None
        if before is not None:
            unchanged = tuple(run for run, value in own.items() if before.get(run) == value)
        senders = {run: value for run, value in own.items() if self._is_sender(run)}
        return WeightChanges(self._add_up(senders), unchanged, self.find_drift(own))

    def _is_sender(self, run: Run) -> bool:
        """Whether this rank is the first that has a run."""
        return self._holders[run][0] == self.parallel.global_rank

    def _own_fingerprints(
        self, wanted: Callable[[Run], bool], part: WeightSlice | None = None
    ) -> dict[Run, int]:
        """Contributions of this rank's runs to the fingerprints of their tensors."""
        return {
            run: fingerprint_in(
                part, run.name, self._local[run].values(), *run.corner, dtype=meta.dtype
            )
            for meta in self.tensors
            if part is None or meta.name in part
            for run in self._runs[meta.name]
            if wanted(run)
        }

    def _add_up(self, own: Mapping[Run, int]) -> dict[str, int]:
        """Fingerprints of whole tensors, summed over all ranks of the group."""
        sums = torch.zeros(len(self.tensors), dtype=torch.int64, device=self.device)
        places = {meta.name: place for place, meta in enumerate(self.tensors)}
        for run, value in own.items():
            sums[places[run.name]] += value
        if self.parallel.group is not None:
            dist.all_reduce(sums, group=self.parallel.group)
        return {meta.name: value for meta, value in zip(self.tensors, sums.tolist(), strict=True)}

    @torch.no_grad()
    def find_drift(self, known: Mapping[Run, int] | None = None) -> str:
        """The first difference between ranks that should have the same values, or an empty string;
        the same on all ranks. Collective over the group.

        Tensor ranks share norms and routers, and the last stage has a copy of a tied embedding;
        these stay equal only if their gradients are reduced correctly. ``known``: current
        fingerprints of this rank's own parts; ``None``: unknown.
        """
        if self.parallel.group is None or not self._replicated:
            return ""
        parts = (*self._local.items(), *self._copies.items())
        shared = [(run, place) for run, place in parts if run in self._replicated]
        own = {
            run: known[run] if known and run in known else self._fingerprint(run, place)
            for run, place in shared
        }
        order = sorted(self._replicated, key=lambda run: (run.name, run.dim, run.start))
        if not self._agree([own.get(run) for run in order]):
            return self._first_difference(own)
        return ""

    def _fingerprint(self, run: Run, place: _Place) -> int:
        """Contribution of a part of this rank to its tensor's fingerprint."""
        dtype = next(meta.dtype for meta in self.tensors if meta.name == run.name)
        return fingerprint_in(None, run.name, place.values(), *run.corner, dtype=dtype)

    def _agree(self, own: Sequence[int | None]) -> bool:
        """Whether all ranks have the same numbers, where they have any."""
        limits = torch.iinfo(torch.int64)
        for operation, missing in (
            (dist.ReduceOp.MIN, limits.max),
            (dist.ReduceOp.MAX, limits.min),
        ):
            numbers = [missing if one is None else one for one in own]
            reduced = torch.tensor(numbers, dtype=torch.int64, device=self.device)
            dist.all_reduce(reduced, op=operation, group=self.parallel.group)
            if operation is dist.ReduceOp.MIN:
                lowest = reduced
        return bool((lowest == reduced).all())

    def _first_difference(self, own: Mapping[Run, int]) -> str:
        everyone: list[dict[Run, int]] = [{} for _ in self.ranks]
        dist.all_gather_object(everyone, dict(own), group=self.parallel.group)
        first: dict[Run, tuple[int, int]] = {}
        for rank, of_rank in zip(self.ranks, everyone, strict=True):
            for run, value in of_rank.items():
                first_rank, first_value = first.setdefault(run, (rank, value))
                if value != first_value:
                    return (
                        f"ranks {first_rank} and {rank} should hold the same {run.name} "
                        f"({run.length} from {run.start}) and do not"
                    )
        return ""

    @torch.no_grad()
    def _begin(
        self, bucket: Bucket, destination: int | None, routes: ExpertRoutes | None, keeps: bool
    ) -> _Pending:
        """Start a bucket's messages; returns the pending transfer."""
        me = self.parallel.global_rank
        receives = destination is None or destination == me
        keeps = keeps and receives
        types = {t.meta.name: t.meta.dtype for t in bucket.tensors}
        pending = _Pending({}, {}, [], [])
        if keeps:
            self._make_room(bucket, routes, pending)
        whole, group = pending.whole, self.parallel.group
        operations: list[dist.P2POp] = []
        of_experts = routes or ()
        to_all = [name for name in types if name not in of_experts]
        for source, runs in self._by_source(to_all, destination).items():
            if source != me and not receives:
                continue
            if source == me and keeps:
                for run in runs:
                    run.of(whole[run.name]).copy_(self._local[run].values())
            if source == me and (destination == me or len(self.ranks) == 1):
                continue
            packed, parts = _pack(runs, types, self.device)
            if source == me:
                for run, part in parts:
                    part.copy_(self._local[run].values())
            elif keeps:
                pending.received += parts
            if destination is None:
                work = dist.broadcast(packed, source, group=group, async_op=True)
                assert work is not None, "this rank is in the group that it takes part in"
                pending.messages.append((work, [packed]))
            elif source == me:
                operations.append(dist.P2POp(dist.isend, packed, destination, group))
            else:
                operations.append(dist.P2POp(dist.irecv, packed, source, group))
        pending.start(operations)
        if routes is not None:
            self._exchange_experts(bucket, routes, pending)
        return pending

    def _make_room(self, bucket: Bucket, routes: ExpertRoutes | None, pending: _Pending) -> None:
        """Allocate memory for this rank's tensors of a bucket."""
        for meta in (tensor.meta for tensor in bucket.tensors):
            shape = meta.shape
            if routes is not None and routes.alone and meta.name in routes:
                part = routes.own_part(meta.name)
                if part is None:
                    continue
                pending.starts[meta.name], shape = part.start, part.shape
            pending.whole[meta.name] = torch.empty(shape, dtype=meta.dtype, device=self.device)

    def _exchange_experts(self, bucket: Bucket, routes: ExpertRoutes, pending: _Pending) -> None:
        """Start the messages of a bucket's experts, after the broadcasts."""
        names = [t.meta.name for t in bucket.tensors if t.meta.name in routes]
        types = {t.meta.name: t.meta.dtype for t in bucket.tensors}
        exchange = routes.exchange(names)
        for name in names:
            if name in pending.whole and not (routes.alone or routes.is_all_needed(name)):
                pending.whole[name].fill_(math.nan)
        # Targets of each run's parts: a parameter is read once, perhaps from host memory.
        targets: dict[Run, list[tuple[Run, Tensor]]] = {}
        operations: list[dist.P2POp] = []
        group = self.parallel.group
        for run, part in exchange.own:
            targets.setdefault(run, []).append((part, pending.place(part)))
        for ranks, parts in exchange.sends:
            packed, views = _pack([part for _, part in parts], types, self.device)
            for (run, part), (_, view) in zip(parts, views, strict=True):
                targets.setdefault(run, []).append((part, view))
            operations += [dist.P2POp(dist.isend, packed, rank, group) for rank in ranks]
        for run, places in targets.items():
            values = self._local[run].values()
            for part, place in places:
                place.copy_(values.narrow(run.dim, part.start - run.start, part.length))
        for rank, received in exchange.receives.items():
            packed, views = _pack(received, types, self.device)
            pending.received += views
            operations.append(dist.P2POp(dist.irecv, packed, rank, group))
        pending.start(operations)

    def _by_source(self, names: Iterable[str], destination: int | None) -> dict[int, list[Run]]:
        """Source rank of each run; the destination takes its own runs from itself."""
        result: dict[int, list[Run]] = {}
        for name in names:
            for run in self._runs[name]:
                holders = self._holders[run]
                own = destination is not None and destination in holders
                source = destination if own and destination is not None else holders[0]
                result.setdefault(source, []).append(run)
        return dict(sorted(result.items()))


@dataclass
class _Pending:
    # The bucket's tensors, still without other ranks' parts; empty if not wanted here. May be a
    # part of an expert's tensor.
    whole: dict[str, Tensor]
    starts: dict[str, int]  # First row or column of such parts.
    # Runs from other ranks, with their positions in the packed messages.
    received: list[tuple[Run, Tensor]]
    # Operations in progress with their buffers, which must live until completion.
    messages: list[tuple[dist.Work, list[Tensor]]]

    def start(self, operations: list[dist.P2POp]) -> None:
        """Send and receive all messages at once: one by one, NCCL would open a communicator, with
        its own memory, for every pair of ranks, and wait for both."""
        if operations:
            buffers = [one.tensor for one in operations]
            works = dist.batch_isend_irecv(operations)
            self.messages += [(work, buffers) for work in works]

    def place(self, run: Run) -> Tensor:
        start = run.start - self.starts.get(run.name, 0)
        return self.whole[run.name].narrow(run.dim, start, run.length)

    @torch.no_grad()
    def finish(self) -> list[tuple[str, Tensor]]:
        """The whole tensors, once all messages have arrived; releases the messages."""
        for work, _ in self.messages:
            work.wait()
        for run, part in self.received:
            self.place(run).copy_(part)
        self.messages.clear()
        self.received.clear()
        return list(self.whole.items())


def _pack(
    runs: Iterable[Run], types: dict[str, torch.dtype], device: torch.device
) -> tuple[Tensor, list[tuple[Run, Tensor]]]:
    """A flat buffer for these runs, and a view of each run's shape in it."""
    places = []
    at = 0
    for run in runs:
        meta = TensorMeta(run.name, run.shape, types[run.name])
        places.append((run, meta, at))
        at += align(meta.num_bytes)
    buffer = torch.empty(at, dtype=torch.uint8, device=device)
    views = [
        (run, buffer[at : at + meta.num_bytes].view(meta.dtype).view(meta.shape))
        for run, meta, at in places
    ]
    return buffer, views


def _runs_by_tensor(
    shapes: dict[str, tuple[int, ...]], holders: dict[Run, tuple[list[int], torch.dtype]]
) -> dict[str, list[Run]]:
    """The runs of each tensor, in order; they must tile it without gap or overlap."""
    found: dict[str, list[Run]] = {}
    for run in holders:
        found.setdefault(run.name, []).append(run)
    for name, whole in shapes.items():
        if name not in found:
            raise WeightsError(f"no Megatron rank holds any of {name} {whole}")
        runs = sorted(found[name], key=lambda run: run.start)
        at = 0
        for run in runs:
            if run.start != at:
                raise WeightsError(
                    f"Megatron ranks hold {name} {whole} with a gap or an overlap at "
                    f"{'row' if run.dim == 0 else 'column'} {min(at, run.start)}"
                )
            at += run.length
        if at != whole[runs[0].dim]:
            raise WeightsError(
                f"Megatron ranks hold {at} of the {whole[runs[0].dim]} "
                f"{'rows' if runs[0].dim == 0 else 'columns'} of {name} {whole}"
            )
        kinds = {str(holders[run][1]) for run in runs}
        if len(kinds) > 1:
            raise WeightsError(f"Megatron ranks hold {name} in several types: {sorted(kinds)}")
        found[name] = runs
    return found
