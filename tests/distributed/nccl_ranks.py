"""Four Megatron ranks that send to vLLM's workers what each keeps of the experts.

Its own program: ranks are forked from a process that has imported vLLM as well. Rank 0's
process has the workers in threads, each with its own communicator over gloo. Takes
``[name, folder, case, shares, engines]`` as JSON; prints one line of JSON, what was found of each.
"""

import json
import math
import multiprocessing
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.weights.expert_shares import ExpertShare
from tests.contracts.gloo_wire import GlooCommunicator, install, worker_of
from tests.distributed import weights_ranks
from tests.distributed.weights_ranks import Case, Ranks

# A message is shorter than most matrices and longer than some; buckets end elsewhere.
MESSAGE_BYTES, BUCKET_MIB = 2048, 0.004


class Worker:
    """One of an engine's, that notes what it is given.

    Attributes:
        updates: Tensors by name, of each finished update.
    """

    def __init__(self, number, shares):
        from rlmath.engines.transports.nccl_shares_engine import SharesEngine

        self.updates: list[dict[str, Tensor]] = []
        self._loaded: dict[str, Tensor] = {}
        model = nn.Module()
        model.load_weights = self._load
        model.experts = _experts(shares[number])
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.model = model
        self.engine: Any = SharesEngine(
            SimpleNamespace(), worker_of(number, len(shares)), torch.device("cpu", 0), model
        )

    def _load(self, weights):
        for name, tensor in weights:
            assert name not in self._loaded, name
            self._loaded[name] = tensor.clone()

    def call_workers(self, function):
        return function(self)

    def init_weight_transfer_engine(self, info):
        self.engine.shutdown()
        # Any way of calling an engine carries it.
        self.engine.init_transfer_engine(self.engine.parse_init_info(json.loads(json.dumps(info))))

    def start_weight_update(self):
        self._loaded = {}

    def update_weights(self, info):
        self.engine.receive_weights(self.engine.parse_update_info(info))

    def finish_weight_update(self, version):
        self.updates.append(self._loaded)


def _experts(share):
    """A layer that keeps these, as vLLM says it."""
    found = nn.Module()
    found.w13_weight = nn.Parameter(torch.zeros(1))
    ranks = SimpleNamespace(tp_rank=share.part, tp_size=share.parts)
    found.moe_config = SimpleNamespace(moe_parallel_config=ranks, tp_shard_with_padding=False)
    found.expert_map = None
    if share.experts is not None:
        of_all = range(1 + max(share.experts))
        found.expert_map = torch.tensor([0 if one in share.experts else -1 for one in of_all])
    return found


class Engine:
    """A Ray actor's handle: what it is called with goes to all its workers at once."""

    def __init__(self, shares):
        self.workers = [Worker(number, shares) for number in range(len(shares))]
        self._threads = ThreadPoolExecutor(len(shares))

    def __getattr__(self, method):
        def remote(*arguments):
            calls = [getattr(worker, method) for worker in self.workers]
            return [self._threads.submit(call, *arguments) for call in calls]

        return SimpleNamespace(remote=remote)


def sync(folder, case, shares, num_engines):
    """Two updates with other weights each, and one after all have met again. On all ranks."""
    import ray

    from rlmath.device import CPU
    from rlmath.engines import transport, transports
    from rlmath.engines.transports.connection import connect
    from rlmath.model.rank_layout import ParallelRank
    from rlmath.model.spec import read_model_spec
    from rlmath.weights.gather import BucketGatherer
    from rlmath.weights.megatron import load_from_hf
    from rlmath.weights.pieces import expert_tensors

    transport.MIB, transports.own_address = MESSAGE_BYTES, lambda: "127.0.0.1"
    ray.get = lambda calls: [[one.result(60) for one in of_engine] for of_engine in calls]
    chunks = weights_ranks._build(folder, case)
    spec, parallel = read_model_spec(folder), ParallelRank.from_megatron()
    load_from_hf(chunks, folder, spec, parallel)
    rank = dist.get_rank()
    engines = tuple(Engine(shares) for _ in range(num_engines)) if rank == 0 else ()
    plan = transports.TransportPlan("nccl", engines, len(shares), 1, "run")
    plan = transports.replace(plan, worker_shares=tuple(shares), others=num_engines - len(engines))
    connection, wrong, sent, refused = None, [], [], []

    def refusal(what, *arguments):
        """Error of this rank when the last worker of the last engine keeps other experts; checks
        that neither it nor a worker has begun to wait for another."""
        before = [one.num_bytes for one in GlooCommunicator.opened]
        last = engines[-1].workers[-1] if engines else None
        if last is not None:
            kept, last.model.experts = last.model.experts, _experts(ExpertShare(None, 5, 7))
        try:
            what(*arguments)
            refused.append(["sent", ""])
        except Exception as error:
            refused.append([type(error).__name__, str(error)])
        if last is not None:
            last.model.experts = kept
        if before != [one.num_bytes for one in GlooCommunicator.opened]:
            refused.append(["waited", ""])

    for update in range(3):
        if update != 1:
            if connection is not None:
                connection.shutdown()
            GlooCommunicator.opened.clear()
            gatherer = BucketGatherer(chunks, spec, parallel, BUCKET_MIB)
            if transports.can_send_shares(gatherer, shares):
                refusal(connect, plan, gatherer, CPU)
            connection = connect(plan, gatherer, CPU)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(-1.5)
        if connection_has_shares(connection):
            refusal(connection.send_weights, update)
        before = [one.num_bytes for one in GlooCommunicator.opened if one.rank == 0]
        connection.send_weights(update)
        own = [one for one in GlooCommunicator.opened if one.rank == 0]
        sent.append(sum(one.num_bytes for one in own) - sum(before))
        whole = dict(pair for bucket in gatherer.gather(None) for pair in bucket)
        for engine in engines:
            for number, worker in enumerate(engine.workers):
                share = shares[number] if connection_has_shares(connection) else ExpertShare()
                expected = _tensors_of_share(whole, share, expert_tensors(spec))
                wrong += [(update, number, name) for name in _differ(worker, update, expected)]
    return {
        "wrong": wrong,
        "refused": refused,
        "sent": sent,
        "whole_bytes": sum(meta.num_bytes for meta in gatherer.tensors),
        "expert_bytes": sum(
            meta.num_bytes for meta in gatherer.tensors if meta.name in expert_tensors(spec)
        ),
        "largest_bytes": max(meta.num_bytes for meta in gatherer.tensors),
        "updates": [len(worker.updates) for engine in engines for worker in engine.workers],
        "groups": sorted((one.rank, one.world_size) for one in GlooCommunicator.opened),
    }


def connection_has_shares(connection):
    """Whether each worker has its own sender."""
    return type(connection._trainer).__name__ == "SharesTrainer"


def _tensors_of_share(whole, share, experts):
    """Tensors of a worker's model: experts as far as it keeps them."""
    found = {}
    for name, tensor in whole.items():
        if name in experts and share.experts is not None and experts[name] not in share.experts:
            continue
        found[name] = tensor
        if name in experts and share.parts > 1:
            dim = 1 if "down_proj" in name else 0
            size = tensor.shape[dim] // share.parts
            found[name] = torch.full_like(tensor, math.nan)
            place = slice(share.part * size, (share.part + 1) * size)
            at = (slice(None),) * dim + (place,)
            found[name][at] = tensor[at]
    return found


def _differ(worker, update, expected):
    got = worker.updates[update]
    if list(got) != list(expected):
        return ["names, or their order"]
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(got[name].nan_to_num(7e7), tensor.nan_to_num(7e7))
    ]


def main():
    # Megatron's shim for a CPU comes first: it does not want to find vLLM.
    import tests.distributed.rank_imports  # noqa: F401

    install()
    weights_ranks.rank_context = lambda: multiprocessing.get_context("fork")
    weights_ranks.sync = sync
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = Ranks(port)
    found = {}
    for name, folder, case, shares, engines in json.loads(sys.argv[1]):
        given = [
            ExpertShare(None if experts is None else frozenset(experts), part, parts)
            for experts, part, parts in shares
        ]
        case["stages"] = tuple(case.get("stages", ()))
        found[name] = ranks.call("sync", folder, Case(**case), given, engines)
    ranks.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
