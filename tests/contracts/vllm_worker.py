"""A vLLM worker's end of a weight transfer in this process, and what joins it to the trainer's."""

import queue
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions

from rlmath.engines import transports
from rlmath.engines.transports import TransportPlan

TIMEOUT_S = 60


class Worker:
    """Weights that a worker is given, in each update.

    Attributes:
        updates: Tensors by name, one dictionary for each finished update.
        keeps: Whether to note them.
        channels: See ``join``.
        engine: vLLM's.
    """

    def __init__(self, backend, device):
        self.updates: list[dict[str, Tensor]] = []
        self._loaded: dict[str, Tensor] = {}
        self.keeps = True
        self.channels: list[Channel] = []
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        model = nn.Module()
        model.load_weights = self._load
        config = SimpleNamespace(backend=backend)
        vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
        self.engine: Any = WeightTransferEngineFactory.create_engine(
            config, vllm_config, torch.device(device, 0), model
        )

    def _load(self, weights):
        # vLLM copies what it loads; a view of the buffer would change with the next bucket.
        if self.keeps:
            self._loaded |= {name: tensor.clone() for name, tensor in weights}

    def call_workers(self, function):
        return [function(SimpleNamespace(device=torch.device("cuda", 0)))]

    def init_weight_transfer_engine(self, info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start_weight_update(self):
        self._loaded = {}
        self.engine.start_weight_update()

    def update_weights(self, info):
        self.engine.update_weights(info)

    def finish_weight_update(self, version):
        self.engine.finish_weight_update()
        self.updates.append(self._loaded)


class Handle:
    """A worker as a Ray actor's handle: it works in its own thread, one call at a time."""

    def __init__(self, worker):
        self._worker = worker
        self._thread = ThreadPoolExecutor(1)

    def __getattr__(self, method):
        function = getattr(self._worker, method)
        return SimpleNamespace(
            remote=lambda *arguments: self._thread.submit(function, *arguments).result(TIMEOUT_S)
        )


class Channel:
    """In the place of NCCL between trainer and worker.

    Attributes:
        destroyed: How often.
    """

    def __init__(self):
        self.destroyed = 0
        self._sent: queue.Queue[Tensor] = queue.Queue()
        # The wire's contents are not memory of the trainer, in whose thread bytes are counted.
        self._wire = ThreadPoolExecutor(1)
        self.end = SimpleNamespace(broadcast=self._receive, destroy=lambda: None)

    def broadcast(self, tensor, src):
        self._sent.put(self._wire.submit(tensor.clone).result(TIMEOUT_S))

    def _receive(self, tensor, src):
        sent = self._sent.get(timeout=TIMEOUT_S)
        assert sent.shape == tensor.shape, "both ends cut the same messages"
        tensor.copy_(sent)

    def destroy(self):
        self.destroyed += 1


def join(patch, backend, cuda, device):
    """A worker for the trainer's ``connect``, with CUDA, NCCL and Ray played.

    Its ``channels`` are the communicators that the trainer has opened, in order.
    """
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    # They load much, which must not happen while CUDA is played.
    from vllm.model_executor.model_loader import mtp_validation, reload  # noqa: F401

    cuda.install(patch, device)
    packed_tensor._get_streams.cache_clear()
    # A trainer's buffer goes when it and the worker have let go of it.
    buffers = []

    def export(buffer):
        buffers.append(weakref.ref(buffer))
        return None, (*range(6), 0, len(buffers) - 1)

    def rebuild(*arguments):
        buffer = buffers[arguments[7]]()
        assert buffer is not None, "the trainer has dropped what it sent"
        return buffer

    patch.setattr(packed_tensor, "reduce_tensor", export)
    patch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    channels = []

    def open_trainer(_):
        channels.append(Channel())
        return channels[-1]

    class Late:
        """The worker joins before the trainer has opened its end."""

        def broadcast(self, tensor, src):
            channels[-1].end.broadcast(tensor, src)

        def destroy(self):
            channels[-1].end.destroy()

    patch.setattr(nccl_engine, "open_trainer_endpoint", open_trainer)
    patch.setattr(nccl_engine, "worker_init_process_group", lambda *_: Late())
    patch.setattr(transports, "own_address", lambda: "127.0.0.1")
    patch.setattr(ray, "get", lambda answers: answers)
    worker = Worker(backend, device)
    worker.channels = channels
    return worker


def plan_for(worker, backend, bucket_size_mib):
    return TransportPlan(backend, (Handle(worker),), 1, bucket_size_mib, "run", serves=(0,))
