"""Parts of vLLM that unmerged adapters (``actor.lora.rollout=unmerged``) rely on, CPU and CUDA."""

from typing import get_args

import pytest
import torch

from rlmath.device import Platform
from rlmath.engines.patches.register import ADAPTER_ENGINES, adapter_backend
from rlmath.engines.transports.connection import connect
from rlmath.model.lora import VLLM_RANKS
from tests.contracts.fake_cuda import FakeCuda
from tests.contracts.test_vllm_weight_transfer import Tensors, awkward_tensors
from tests.contracts.vllm_worker import Handle, join, plan_for

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_ranks_are_those_of_vllm():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == VLLM_RANKS


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_adapters_arrive_twice_and_nothing_is_loaded_into_the_model(monkeypatch, transport):
    """Through vLLM's own producers and consumers, in tensors around the bucket's size."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, packed_tensor

    name = adapter_backend(transport)
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, *ADAPTER_ENGINES[transport])
    worker = join(monkeypatch, name, FakeCuda(), "cpu")
    plan = plan_for(worker, transport, 1)
    assert isinstance(plan.engines[0], Handle)
    given = awkward_tensors(0)
    source = Tensors(given, 1)
    connection = connect(plan, source, Platform("cuda", "nccl", "local"))
    for version in (1, 2):
        source.values = awkward_tensors(version)
        connection.send_weights(version)
        held = worker.engine.inbox.tensors
        assert list(held) == list(source.values)
        assert all(torch.equal(held[key], one) for key, one in source.values.items())
        assert worker.updates[-1] == {}
    packed_tensor._get_streams.cache_clear()


def products(tokens, dtype, slots):
    """A step of the same tokens by vLLM's way and by the short one, and the exact result."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rlmath.engines.patches.cpu_adapters import OneAdapter

    torch.manual_seed(0)
    a = tuple(torch.randn(1, 1, 8, 24).to(dtype) for _ in range(2))
    b = tuple(torch.randn(1, 1, width, 8).to(dtype) for width in (10, 6))
    x, y = torch.randn(tokens, 24).to(dtype), torch.randn(tokens, 16).to(dtype)
    found = {}
    for kind in (PunicaWrapperCPU, OneAdapter):
        wrapper = kind(tokens, max_batches=tokens, device="cpu")
        mapping = LoRAMapping(tuple(slots), tuple(slots), is_prefill=True)
        wrapper.update_metadata(mapping, [1], 2, 100)
        mine = y.clone()
        wrapper.add_lora_linear(mine, x, a, b, 1.0, (10, 6))
        found[kind.__name__] = mine
    parts = [
        x.double() @ p[0, 0].double().t() @ q[0, 0].double().t() for p, q in zip(a, b, strict=True)
    ]
    found["exact"] = y.double() + torch.cat(parts, 1)
    found["before"] = y
    return found


def test_one_adapters_products_on_cpu_are_those_of_vllm():
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        found = products(7, dtype, [1] * 7)
        theirs, mine = (
            (found[kind].double() - found["exact"]).abs().max()
            for kind in ("PunicaWrapperCPU", "OneAdapter")
        )
        # Rounded less often.
        assert mine <= max(theirs, torch.tensor(1e-5)) and theirs < bound
    found = products(3, torch.float32, [0, 0, 0])
    assert torch.equal(found["OneAdapter"], found["before"])
