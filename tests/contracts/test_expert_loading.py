"""vLLM's loader reads of an expert's whole tensors the share that its worker names."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.engines.transports.engine_parts import expert_share
from rlmath.weights.runs import Run

SIZE, HIDDEN, EXPERTS = 12, 8, 4


def layer(tp_rank, tp_size, held, padding=False):
    """A layer's experts with what the loader asks of itself."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    module = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(module)
    expert_map = None
    if held is not None:
        expert_map = torch.full((EXPERTS,), -1)
        expert_map[held] = torch.arange(len(held))
    module.__dict__["quant_method"] = SimpleNamespace()
    module.__dict__["_expert_map"] = expert_map
    module.moe_config = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(tp_rank=tp_rank, tp_size=tp_size),
        tp_shard_with_padding=padding,
        is_act_and_mul=True,
    )
    module.w13_weight = torch.nn.Parameter(torch.zeros(1))
    return module


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_loader_reads_the_share_and_nothing_else(tp_size):
    size = SIZE // tp_size
    for tp_rank in range(tp_size):
        module = layer(tp_rank, tp_size, None)
        share = expert_share(torch.nn.ModuleList([module]))
        assert share is not None and share.experts is None
        for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            shape = (SIZE, HIDDEN) if dim == 0 else (HIDDEN, SIZE)
            whole = torch.randn(shape)
            part = share.of(Run(name, dim, 0, shape), 3, SIZE)
            sent = torch.full(shape, torch.nan)
            part.of(sent).copy_(part.of(whole))
            held = torch.full((2 * size, HIDDEN) if dim == 0 else (HIDDEN, size), -7.0)
            if name == "w2":
                module._load_w2(held, dim, sent, tp_rank)
            else:
                module._load_w13(held, dim, name, sent, tp_rank)
            here = (
                held if name == "w2" else held[slice(size) if name == "w1" else slice(size, None)]
            )
            assert torch.equal(here, whole.narrow(dim, tp_rank * size, size)), name


def test_whole_experts_and_slices_with_a_gap():
    share = expert_share(torch.nn.ModuleList([layer(0, 1, [1, 3]), layer(0, 1, [3, 1])]))
    assert share is not None and share.experts == {1, 3} and share.fraction(4) == 0.5
    assert share.of(Run("w1", 0, 0, (SIZE, HIDDEN)), 2, SIZE) is None
    # Layers that read different shares, slices that lie otherwise, and no experts.
    assert expert_share(torch.nn.ModuleList([layer(0, 1, [1]), layer(0, 1, [2])])) is None
    assert expert_share(layer(0, 2, None, padding=True)) is None
    assert expert_share(torch.nn.Linear(2, 2)) is None
