"""Routing replay: an update routes each token to the experts chosen by the old-log-prob pass, or by
the engine when it sampled.

A router's choice is a step function: if two experts are close, the smallest change of a weight or
of a sum's order reroutes a token, and its log-prob jumps. The ratio of new to old log-probs then
measures the jump instead of the policy. With the routes of the old pass replayed, in the forward
and the backward pass, it measures the same experts before and after (R2 in Zheng et al. 2025,
"Stabilizing Reinforcement Learning with LLMs"). The weights of the chosen experts are the router's
current ones, with their gradient.

With the engine's routes (R3 there) that pass, and any other pass of the policy over the same
sequences, routes each token as the engine did. A token without such routes is routed by its router,
and counted. The update replays the recorded routes; without an earlier pass, its first forward pass
records them.

Each router has Megatron's recorder. Routes stay on the rank that recorded them: the update's
micro-batches are those of the old pass, so a micro-batch has the same tokens in the same positions
on the same rank, under any layout. They are kept in host memory, one byte per choice for up to 256
experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from rlmath.actor.engine_routes import EngineRoutes, UploadedRoutes, engine_routes
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.routing_totals import RoutingTotals
from rlmath.actor.stops import stops
from rlmath.batching.shards import Shard, Share
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.types import TrainingBatch


class RoutingReplay:
    """Records and replays the routes of a rank's part of a model. All ranks make the same calls.
    ``from_engine``: route tokens as the engine did."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        spec: ModelSpec,
        layout: Layout,
        parallel: ParallelRank,
        platform: Platform,
        from_engine: bool = False,
    ) -> None:
        self._spec, self._platform, self._from_engine = spec, platform, from_engine
        moe_layers = [n for n in range(spec.layers) if spec.is_moe_layer(n)]
        self._columns = {layer: column for column, layer in enumerate(moe_layers)}
        # Tensor ranks share each micro-batch's tokens (sequence parallelism).
        self._ranks, self._rank = layout.tensor_parallel, parallel.tp_rank
        self._routers = [
            RouterRecorder(router, spec.experts)
            for chunk in chunks
            for router in chunk.modules()
            if isinstance(router, TopKRouter)
        ]
        self._shard: Shard | None = None
        self._totals = RoutingTotals.zeros(spec.layers, spec.experts, platform.torch_device)

    @contextlib.contextmanager
    def recording(self, shard: Shard, micro_batches: Sequence[PackedMicroBatch]) -> Iterator[None]:
        """Record the routes of a pass over a whole shard, replacing earlier ones."""
        self.clear()
        engine = self._engine_routes(shard.whole(), micro_batches)
        with self._running(RouterReplayAction.RECORD, micro_batches, 0, engine):
            yield
        self._shard = shard

    @contextlib.contextmanager
    def following(self, shard: Shard, micro_batches: Sequence[PackedMicroBatch]) -> Iterator[None]:
        """Route a forward-only pass over a shard as the engine did, without recording."""
        engine = self._engine_routes(shard.forward_share(), micro_batches)
        if engine is None:
            yield
            return
        with self._running(RouterReplayAction.RECORD, micro_batches, 0, engine, keeps=False):
            yield

    @contextlib.contextmanager
    def replaying(
        self, first: int, share: Share, micro_batches: Sequence[PackedMicroBatch]
    ) -> Iterator[None]:
        """Route a minibatch as recorded; as the engine did if no pass has recorded it. ``first``:
        index of its first micro-batch in the shard. ``micro_batches``: its packed micro-batches."""
        action, engine = RouterReplayAction.REPLAY_FORWARD, None
        if self._shard is None:
            action = RouterReplayAction.RECORD
            engine = self._engine_routes(share, micro_batches)
        with self._running(action, micro_batches, first, engine):
            yield

    def check(self, shard: Shard) -> None:
        """Raise unless the routes were recorded by the shard's own old-log-prob pass, or its
        samples have the engine's routes. Raises ValueError: there are none, or they belong to
        another shard."""
        # Values may be added to a shard, but its `places` stay the same object.
        is_recorded = self._shard is not None and self._shard.places is shard.places
        if self._from_engine and not is_recorded:
            self.clear()
        elif not is_recorded:
            raise ValueError(
                "actor.routing_replay=old_log_probs: no routes for this shard; compute its old "
                "log-probs before its update"
            )

    def measured_minibatch(self, minibatches: int) -> int:
        """The minibatch of an update whose mismatch with and without replay is measured.

        With the engine's routes the first, with the weights that sampled; with those of the old
        pass the last, after the others' updates.
        """
        return 0 if self._from_engine else minibatches - 1

    def add_mismatch(self, batch: TrainingBatch, replayed: Tensor, free: Tensor) -> None:
        """Count the difference of the update's log-probs from the rollout log-probs, or from those
        of the old pass if its routes are replayed.

        Args:
            replayed: ``[R]`` log-probs with the replayed routes.
            free: ``[R]`` log-probs with freely chosen routes, with the same weights.
        """
        before = batch.engine_log_probs if self._from_engine else batch.old_log_probs
        assert before is not None
        self._totals.add_mismatch(before, replayed, free, batch.loss_mask)

    def finish(self) -> dict[str, float]:
        """Clear the routes. Collective. Returns ``routing/...`` over all ranks."""
        totals = self._totals
        self.clear()
        totals.all_reduce()
        return totals.metrics([self._spec.is_moe_layer(n) for n in range(self._spec.layers)])

    def clear(self) -> None:
        self._shard = None
        spec, device = self._spec, self._platform.torch_device
        self._totals = RoutingTotals.zeros(spec.layers, spec.experts, device)
        for router in self._routers:
            router.routes.clear()

    @contextlib.contextmanager
    def _running(
        self,
        action: RouterReplayAction,
        micro_batches: Sequence[PackedMicroBatch],
        first: int,
        engine: Sequence[EngineRoutes] | None = None,
        keeps: bool = True,
    ) -> Iterator[None]:
        is_text = [self._is_text(one) for one in micro_batches]
        uploaded = None if engine is None else UploadedRoutes(engine, self._platform)
        for router in self._routers:
            router.begin(action, first, is_text, self._totals if keeps else None)
            router.follow(uploaded, self._columns[router.layer])
        try:
            yield
            for router in self._routers:
                router.check_calls()
        finally:
            for router in self._routers:
                router.end()

    def _is_text(self, one: PackedMicroBatch) -> Tensor:
        """Whether each token that this rank's routers see is text rather than padding."""
        places = self._places(one)
        own = torch.arange(places.start, places.stop, device=one.tokens.device)
        return own < one.text_tokens

    def _places(self, one: PackedMicroBatch) -> range:
        """Positions in the packed row that this rank's routers see; an MoE has no context ranks."""
        tokens = one.tokens.numel() // self._ranks
        return range(self._rank * tokens, (self._rank + 1) * tokens)

    def _engine_routes(
        self, share: Share, micro_batches: Sequence[PackedMicroBatch]
    ) -> list[EngineRoutes] | None:
        """The engine's routes of each micro-batch; ``None`` if not used."""
        if not self._from_engine:
            return None
        layers, topk = len(self._columns), self._spec.experts_per_token
        return [
            engine_routes(share.batch, one, self._places(packed), layers, topk)
            for one, packed in zip(share.micro_batches, micro_batches, strict=True)
        ]


class RouterRecorder(RouterReplay):
    """Megatron's recorder of one router, extended to track the current micro-batch.

    Megatron's recorder keeps one micro-batch, and the caller must announce each call's micro-batch,
    which a pipeline schedule does not. But it sends micro-batches through a router in order, in the
    forward passes and in the backward passes, which rerun recomputed layers. A layer that will be
    recomputed first runs without gradients. A router's n-th call without gradients is therefore the
    n-th micro-batch, and so is its n-th call with gradients. ``experts``: number of experts of the
    model.
    """

    def __init__(self, router: Any, experts: int) -> None:
        super().__init__()
        # Megatron's list is global to the process, for all models.
        RouterReplay.global_router_replay_instances.remove(self)
        router.router_replay = self
        # [tokens, experts per token] of each micro-batch, in host memory.
        self.routes: list[Tensor] = []
        self._router = router
        self._dtype = torch.uint8 if experts <= 256 else torch.int16
        self._first, self._is_text = 0, [torch.zeros(0)]
        self._calls = {False: 0, True: 0}
        self._totals: RoutingTotals | None = None
        self._engine: UploadedRoutes | None = None
        self._column = 0

    def begin(
        self,
        action: RouterReplayAction,
        first: int,
        is_text: list[Tensor],
        totals: RoutingTotals | None,
    ) -> None:
        """Start a pass.

        Args:
            first: Index of the pass's first micro-batch among those recorded.
            is_text: ``[tokens]`` bool of each micro-batch: not padding.
            totals: Totals to add to; ``None``: neither count nor record.
        """
        self.set_router_replay_action(action)
        self._first, self._is_text, self._totals = first, is_text, totals
        self._calls = {False: 0, True: 0}

    def follow(self, engine: UploadedRoutes | None, column: int) -> None:
        """For the pass that begins, record the engine's routes where known. ``engine``: shared by
        all routers; ``None``: the router's own routes. ``column``: index of this router's layer in
        them."""
        self._engine, self._column = engine, column

    def end(self) -> None:
        """Route freely again."""
        self.clear_router_replay_action()
        self.clear_indices()
        self._totals, self._engine, self._is_text = None, None, []

    def check_calls(self) -> None:
        """Raise unless every micro-batch went through the router, at most once per kind of call."""
        count = len(self._is_text)
        calls = set(self._calls.values())
        if not calls <= {0, count} or (count and calls == {0}):
            raise RuntimeError(
                f"layer {self.layer}: the router ran {self._calls[False]} times without and "
                f"{self._calls[True]} times with gradients for {count} micro-batches; Megatron's "
                "schedule is not the one that routing replay knows"
            )

    @property
    def layer(self) -> int:
        """Index of the layer in the model, from 0."""
        return int(self._router.layer_number) - 1

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's function: scores ``[tokens, topk]`` and indices of the chosen experts."""
        given = (scores, topk, num_groups, group_topk, default_compute_topk)
        if self.router_replay_action is None:
            found: tuple[Tensor, Tensor] = super().get_replay_topk(*given)
            return found
        with_gradients = torch.is_grad_enabled()
        index = self._calls[with_gradients]
        self._calls[with_gradients] += 1
        if stops.is_skipped(index):
            choice: tuple[Tensor, Tensor] = default_compute_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk
            )
            return choice
        is_new = index >= self._calls[not with_gradients]
        is_recorded = self._totals is not None and self._first + index < len(self.routes)
        if self.router_replay_action is RouterReplayAction.RECORD and not is_recorded:
            return self._record(index, *given)
        recorded = self.routes[self._first + index]
        if recorded.shape != (len(scores), topk):
            raise RuntimeError(
                f"layer {self.layer}: recorded routes are {list(recorded.shape)}, and micro-batch "
                f"{index} needs {[len(scores), topk]}"
            )
        chosen = recorded.to(scores.device, non_blocking=True).long()
        if is_new and self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            self._compare(index, chosen, *given)
        return scores.gather(1, chosen), chosen

    def _record(
        self, index: int, scores: Tensor, topk: int, groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Record and use the engine's routes where known, else the router's own."""
        values, chosen = choose(scores, topk, num_groups=groups, group_topk=group_topk)
        if self._engine is not None:
            chosen = self._as_the_engine(index, chosen)
            values = scores.gather(1, chosen)
        if self._totals is not None:
            # To page-locked memory on CUDA, after the queued kernels, so the host does not wait.
            self.routes.append(chosen.to(self._dtype).to("cpu", non_blocking=True))
            self._totals.add_load(self.layer, chosen, self._is_text[index])
        return values, chosen

    def _as_the_engine(self, index: int, own: Tensor) -> Tensor:
        assert self._engine is not None
        given = self._engine.of(index)
        if given.is_known.shape != own.shape[:1]:
            raise RuntimeError(
                f"layer {self.layer}: the engine's routes are of {len(given.is_known)} tokens, and "
                f"micro-batch {index} has {len(own)}"
            )
        is_known, routes = given.is_known, given.routes[:, self._column].long()
        if self._totals is not None:
            self._totals.add_engine(self.layer, routes, own, is_known, self._is_text[index])
        return torch.where(is_known[:, None], routes, own)

    @torch.no_grad()
    def _compare(
        self,
        index: int,
        recorded: Tensor,
        scores: Tensor,
        topk: int,
        groups: Any,
        group_topk: Any,
        choose: Any,
    ) -> None:
        assert self._totals is not None
        _, now = choose(scores, topk, num_groups=groups, group_topk=group_topk)
        self._totals.add_compared(self.layer, recorded, now, self._is_text[index])
