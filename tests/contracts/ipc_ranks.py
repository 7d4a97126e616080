"""Four trainer ranks and two engines of two GPUs each: what ``ipc`` sends to whom, and who waits.

Each rank is a process on gloo, with CUDA played as in ``fake_cuda.py``. Prints one JSON line: of
each rank the calls to engines, the collectives of the whole world while weights are sent, when its
buffer was full, and when its engine had read.
"""

import json
import multiprocessing
import os
import sys
import time
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist

# Before the processes are forked: they take seconds.
from vllm.distributed.weight_transfer import packed_tensor

from rlmath.device import Platform
from rlmath.engines.transports import TransportPlan, ipc
from rlmath.engines.transports.connection import connect
from rlmath.engines.transports.shared_gpus import WorkerPlace, plans_of_ranks
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from tests.contracts.fake_cuda import FakeCuda

RANKS, WIDTH = 4, 2
# An engine reads slowly: a rank that does not wait for it fills its buffer again meanwhile.
READ_S = 0.1


class Engine:
    """A handle that notes what it is called with; its workers are on two GPUs."""

    def __init__(self, number):
        self.gpus = [f"GPU-{WIDTH * number + i}" for i in range(WIDTH)]
        self.calls: list[tuple[str, list[str]]] = []
        self.read_s: list[float] = []

    def __getattr__(self, method):
        def remote(*arguments):
            if method == "call_workers":
                return [WorkerPlace(gpu, None) for gpu in self.gpus]
            handles = arguments[0].get("ipc_handles", {}) if arguments and method[0] == "u" else {}
            self.calls.append((method, sorted(handles)))
            if handles:
                time.sleep(READ_S)
                self.read_s.append(time.monotonic())

        return SimpleNamespace(remote=remote)


class Source:
    """Six tensors of three buckets, on every rank."""

    def __init__(self):
        self.tensors = [TensorMeta(f"t{i}", (256, 1024), torch.bfloat16) for i in range(6)]
        self.buckets = cut_into_buckets(self.tensors, 1)

    def gather(self, destination, routes, keeps):
        assert destination is None and keeps
        for bucket in self.buckets:
            yield [(t.meta.name, torch.zeros(t.meta.shape).bfloat16()) for t in bucket.tensors]


def rank_program(rank, store, answers):
    """One rank, from ``connect`` to the end of two updates."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    # Pipeline stages are in different numbers of Megatron's groups.
    dist.new_group([0])
    patch = pytest.MonkeyPatch()
    FakeCuda().install(patch, "cpu")
    properties = SimpleNamespace(uuid=f"GPU-{rank}")
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    patch.setattr(packed_tensor, "reduce_tensor", lambda _: (None, (*range(6), 0, rank)))
    patch.setattr(ray, "get", lambda refs: refs)
    engines = tuple(Engine(number) for number in range(RANKS // WIDTH))
    full_s = []
    gather_handles = ipc.IpcTrainer._all_gather_and_merge_handles

    def noted_handles(trainer, handles):
        full_s.append(time.monotonic())
        return gather_handles(trainer, handles)

    patch.setattr(ipc.IpcTrainer, "_all_gather_and_merge_handles", noted_handles)
    whole = TransportPlan("ipc", engines, WIDTH, 1, "run")
    plan = plans_of_ranks(whole, [f"GPU-{number}" for number in range(RANKS)])[rank]
    source = Source()
    connection = connect(plan, source, Platform("cuda", "gloo", "local"))
    of_world = []
    for name in ("barrier", "all_gather_object", "broadcast_object_list"):
        original = getattr(dist, name)

        def note_call(*arguments, name=name, original=original, **named):
            if named.get("group") is None:
                of_world.append(name)
            return original(*arguments, **named)

        patch.setattr(dist, name, note_call)
    for version in (1, 2):
        connection.send_weights(version)
    read_s = [moment for engine in engines for moment in engine.read_s]
    found = {"of_world": of_world, "full_s": full_s, "read_s": read_s}
    answers.put((rank, {"calls": [engine.calls for engine in engines], **found}))
    connection.shutdown()
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    store = f"{sys.argv[1]}/store"
    ranks = [
        context.Process(target=rank_program, args=(rank, store, answers), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found = dict(answers.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    print(json.dumps([found[rank] for rank in range(RANKS)]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
