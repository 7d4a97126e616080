"""Megatron ranks without Megatron: a rank's own code around a model that draws numbers."""

import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

from rlmath.actor.settings import StartedRank, UpdateResult
from rlmath.actor.token_values import TokenValues
from rlmath.actor.worker import ActorWorker
from rlmath.algorithms.peers import Alone
from rlmath.device import CPU
from rlmath.engines import transports
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from rlmath.weights.gather import WeightChanges

TENSORS = tuple(
    TensorMeta(f"model.layers.{i}.mlp.down_proj.weight", (64, 64), torch.float32) for i in range(24)
)
PRINTS = {one.name: zlib.crc32(one.name.encode()) for one in TENSORS}


class World:
    """The ranks of a host: what stands in for collectives."""

    def __init__(self):
        self.ranks: list[StubRank] = []
        self.caller = 0
        self._sums: list[dict[str, float]] | None = None
        transports.dist = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: self.caller)

    def forget(self):
        """A step begins."""
        self._sums = None

    def sums(self):
        """Sums of each minibatch that all ranks report after their all-reduce."""
        if self._sums is None:
            self._sums = self._add_up()
        return self._sums

    def _add_up(self):
        shards = [rank.step.shard for rank in self.ranks if rank.actor.reports]
        found = []
        for shares in zip(*(shard.shares() for shard in shards), strict=True):
            weights = torch.cat([one.weights for one in shares]).double()
            found.append(
                {
                    "token_count": float(sum(int(one.batch.loss_mask.sum()) for one in shares)),
                    "loss_weight": float(weights.sum()),
                    "loss_weight_squares": float(weights.square().sum()),
                    "importance_ratio": 1.0,
                    **dict.fromkeys(("loss", "policy_loss", "entropy_term", "term_sizes"), 0.0),
                    "signal": 1.0,
                    "grad_norm": 1.0,
                    "lr": 1e-4,
                    "discarded": 0.0,
                }
            )
        return found


class StubModel(Alone):
    """Stands where a rank has its policy."""

    is_last_stage = True
    settings = SimpleNamespace(lora=None)

    def __init__(self, world, reports):
        self._world, self.reports = world, reports

    def shard_log_probs(self, shard, name="policy", seed=0):
        values = shard.batch.engine_log_probs.clone()
        if name == "noise":
            values += 1e-5 * (torch.arange(values.numel()) % 2)
        return TokenValues(torch.arange(values.numel()), values, -values)

    def update_shard(self, shard, plan):
        assert shard.batch.advantages is not None and shard.batch.old_log_probs is not None
        sums = self._world.sums()
        assert len(sums) == plan.minibatches
        return UpdateResult([dict(one) for one in sums], {}, None)

    def begin_release(self, empty_cache): ...


class StubRank(ActorWorker):
    """A rank with its own calls, step and connection, in a process that others share."""

    world = World

    def __init__(self, world, rank, log_path, environment):
        self.rank, self._world = rank, world
        world.ranks.append(self)
        # The driver looks for it.
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        Path(log_path).touch()

    def start(self, settings, layout, device, rendezvous, seed, num_threads):
        """In the place of a model, a stub."""
        tensor_rank = self.rank % layout.tensor_parallel
        self.actor = StubModel(self._world, tensor_rank == 0)
        self.platform, self.value_model, self._peaks = CPU, None, {}
        self.connection = self.gatherer = None
        return StartedRank(self.rank // layout.tensor_parallel, 0, 0.0)

    def run_part(self, shard, plan):
        """See ``ActorWorker``."""
        self._world.forget()
        return super().run_part(shard, plan)

    def connect_engines(self, plan):
        """See ``ActorWorker``."""
        self._world.caller = self.rank
        super().connect_engines(plan)

    def _gatherer(self, **sizes):
        return StubWeights(self.rank)


class StubWeights:
    """Stands where a rank has its gatherer: a few buckets of weights."""

    def __init__(self, rank):
        # Rank 0 has the copy of the model that is sent.
        self.ranks = [rank]
        self.parallel = SimpleNamespace(global_ranks=self.ranks, group=None)
        self.buckets = cut_into_buckets(TENSORS, 0.125)

    def write_local(self, bucket, buffer):
        buffer[: bucket.num_bytes] = 1

    def fingerprints(self, part=None):
        return dict(PRINTS)

    def changes(self):
        return WeightChanges(dict(PRINTS), ())
