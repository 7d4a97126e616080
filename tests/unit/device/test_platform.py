import pytest
import torch

from rlmath import device
from rlmath.cluster.nodes import refuse_idle_gpus
from rlmath.device import CPU, Platform
from rlmath.errors import UserError


@pytest.mark.parametrize("installed", [True, False])
def test_triton_runs_on_gpus_where_it_is_installed(monkeypatch, installed):
    monkeypatch.setattr(device, "find_spec", lambda name: object() if installed else None)
    assert Platform("cuda", "nccl", "transformer_engine").runs_triton == installed
    assert not CPU.runs_triton
    # The rank of a dry run believes that it is on a GPU, and computes nothing.
    assert not Platform("cuda", "fake", "local").runs_triton


@pytest.mark.parametrize(
    ("capability", "size", "batched"),
    [((9, 0), 2, True), ((9, 0), 4, False), ((10, 0), 2, False)],
)
def test_context_ranks_send_as_in_transformer_engine(monkeypatch, capability, size, batched):
    """``AttnFuncWithCPAndKVP2P``: two ranks in one call, except on Blackwell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    platform = Platform("cuda", "nccl", "transformer_engine")
    assert platform.batches_context_messages(size) == batched


@pytest.mark.parametrize("platform", [CPU, Platform("cuda", "nccl", "transformer_engine")])
def test_cached_memory_is_the_allocators_of_the_device(monkeypatch, platform):
    calls = []
    monkeypatch.setattr(device, "return_freed_memory", lambda: calls.append("cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cuda"))
    platform.release_cached_memory()
    assert calls == [platform.name]


def test_driver_of_a_cluster_needs_no_gpu(monkeypatch):
    """Ray's head may be a CPU node; ranks look at their own node."""
    monkeypatch.setattr(device, "cuda_visible", lambda: False)
    monkeypatch.setattr(device.te_install, "missing_part", lambda: "everything")
    chosen = device.choose_platform("cuda", "auto", elsewhere=True)
    assert chosen == Platform("cuda", "nccl", "transformer_engine")
    chosen.prepare_driver()
    assert device.choose_platform("cuda", "local", elsewhere=True).layer_spec == "local"
    assert device.choose_platform("auto", elsewhere=True) == CPU
    with pytest.raises(UserError, match=r"cluster\.device=cuda"):
        device.choose_platform("cuda")


def test_auto_on_a_cpu_head_refuses_a_cluster_with_gpus(monkeypatch):
    """Else the run would train on the CPUs of 16 GPU nodes."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0})
    refuse_idle_gpus()
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 128.0})
    with pytest.raises(UserError, match=r"128 GPUs; set cluster\.device=cuda"):
        refuse_idle_gpus()
