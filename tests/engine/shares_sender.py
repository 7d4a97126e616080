"""Trainer ranks that send an engine's workers their shares of the experts, each in a process."""

from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlmath.device import CPU
from rlmath.engines import transports
from rlmath.engines.transports.connection import connect
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import read_model_spec
from rlmath.weights.gather import BucketGatherer
from tests.contracts.gloo_wire import install
from tests.unit.weights.model_ranks import modules_like


class ShareSender:
    """A Ray actor that stands where one of Megatron's expert-parallel ranks does."""

    def __init__(self, folder, rank, world_size, rendezvous):
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world_size)
        install()
        self._spec = read_model_spec(folder)
        self._tensors = load_file(f"{folder}/model.safetensors")
        parallel = ParallelRank(ep_rank=rank, ep_size=world_size, group=dist.group.WORLD)
        self._model = modules_like(self._spec, 0, parallel, dtype=torch.bfloat16)
        self._gatherer = BucketGatherer([self._model], self._spec, parallel, 0.05)
        self._connection: Any = None

    def set_factor(self, factor):
        """The folder's tensors, times this."""
        with torch.no_grad():
            for run, place in self._gatherer._local.items():
                place.values().copy_(factor * run.of(self._tensors[run.name]))

    def connect(self, plan):
        """Meet the engines; which trainer it is."""
        transports.own_address = lambda: "127.0.0.1"
        if self._connection is not None:
            self._connection.shutdown()
        self._connection = connect(plan, self._gatherer, CPU)
        return type(self._connection._trainer).__name__

    def send_weights(self, version):
        self._connection.send_weights(version)

    def weights_fingerprints(self):
        return self._gatherer.fingerprints()
