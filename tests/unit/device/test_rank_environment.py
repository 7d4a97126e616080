import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlmath import device
from rlmath.actor import group
from rlmath.actor.model import ModelSettings
from rlmath.actor.rank_calls import RankCalls
from rlmath.actor.settings import ActorSettings
from rlmath.device import Platform
from rlmath.device.environment import rank_environment
from rlmath.device.gloo import INTERFACE, use_interface_of
from rlmath.model.parallel import Layout
from rlmath.model.precision import Precision

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)


def environment(device="cuda", tp=1, cp=1, **others):
    settings = {"num_threads": 3, "batch_invariant": False} | others
    return rank_environment(device, layout=Layout(tp, context_parallel=cp), **settings)


def test_one_hardware_queue_where_collectives_and_products_overlap():
    assert environment(tp=2)[CONNECTIONS] == environment(cp=2)[CONNECTIONS] == "1"
    assert CONNECTIONS not in environment() and CONNECTIONS not in environment("cpu", tp=2)


def test_user_setting_of_cuda_connections_is_kept(monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "32")
    assert environment(tp=2)[CONNECTIONS] == "32"


def test_ranks_on_gpus_record_their_collectives_into_the_runs_logs():
    found = environment(log_dir="/run/logs")
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/run/logs/nccl_trace_rank_"
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in environment("cpu")
    assert Platform("cuda", "nccl", "local").collective_timeout_s == 600


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", ALLOCATOR)
def test_ranks_that_share_gpus_have_no_expandable_segments(monkeypatch, name):
    """Another process opens their memory (``ipc``), which needs rights that containers withhold."""
    for one in ALLOCATOR:
        monkeypatch.delenv(one, raising=False)
    assert not set(environment(shares_gpus=True)) & set(ALLOCATOR)
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    shared = environment(shares_gpus=True)
    assert shared[name] == "max_split_size_mb:512,expandable_segments:False"
    assert not (set(environment()) | set(environment("cpu", shares_gpus=True))) & set(ALLOCATOR)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert name not in environment(shares_gpus=True)


def test_batch_invariance_is_known_before_cublas_and_nccl_start():
    invariant = environment(batch_invariant=True)
    assert invariant["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert invariant["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert invariant["NCCL_ALGO"] == "^NVLS"
    assert not set(environment()) & {"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO"}


@pytest.mark.parametrize(("given", "threads"), [(None, 6), (2, 2)])
def test_a_gpu_rank_is_bound_beside_its_gpu_and_compiles_on_its_nodes_disk(
    monkeypatch, tmp_path, given, threads
):
    """Not with the one thread that Ray gives, nor in a home folder that all nodes share."""
    set_to = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "so that it is as before after the test")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(device, "node_cache", lambda: tmp_path)
    monkeypatch.setattr(device, "bind_to_gpu", lambda index: set_to.append(index) or 6)
    monkeypatch.setattr(device.te_install, "import_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    platform = Platform("cuda", "nccl", "transformer_engine")
    platform.prepare_megatron_process(local_rank=3, num_threads=given)
    assert set_to == [3, 3, threads]
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "ranks_triton")


def test_a_cpu_rank_has_its_threads():
    assert environment("cpu")["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment()


def test_a_ranks_log_has_no_warnings_of_libraries(monkeypatch):
    """Python reads the filters, and those that a user sets hold."""
    code = (
        "import warnings\n"
        "warnings.warn('x is deprecated', FutureWarning)\n"
        "warnings.warn('Apex is not installed. Falling back to Torch Norm')\n"
        "warnings.warn('the disk is full')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert [line for line in done.stderr.splitlines() if "Warning" in line] == [
        "<string>:4: UserWarning: the disk is full"
    ]
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert environment()["PYTHONWARNINGS"] == "error"


def test_each_ranks_process_starts_with_it(monkeypatch, tmp_path):
    """Ray puts ``env_vars`` into the process's environment before it runs any Python."""
    started = []

    class Worker:
        def __getattr__(self, name):
            return SimpleNamespace(remote=lambda *_: name)

    class Remote:
        def __init__(self, _): ...

        def options(self, **options):
            started.append(options)
            return SimpleNamespace(remote=lambda *_: Worker())

    monkeypatch.setattr(group.ray, "remote", Remote)
    monkeypatch.setattr(RankCalls, "results", lambda self, refs, method: [("host", 1)])
    precision = Precision(batch_invariant=True)
    settings = ActorSettings(
        model_path="",
        model=ModelSettings(torch.bfloat16, precision=precision),
        optimizer=None,
        temperature=1.0,
        max_tokens_per_microbatch=1,
        max_sequence_length=1,
    )
    ranks = group.ActorGroup(
        settings,
        Layout(2, 1, 2),
        device="cuda",
        seed=0,
        num_threads=1,
        log_dir=str(tmp_path),
        shares_gpus=True,
    )
    monkeypatch.setenv(ALLOCATOR[1], "expandable_segments:True")
    ranks.launch()
    assert len(started) == 4
    for options in started:
        variables = options["runtime_env"]["env_vars"]
        assert variables[CONNECTIONS] == "1"
        assert variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert variables[ALLOCATOR[1]] == "expandable_segments:False"


@pytest.mark.parametrize(
    ("address", "chosen", "expected"),
    [
        ("10.0.0.7", "", "eth1"),
        ("127.0.0.1", "", "lo"),
        ("10.0.0.7", "ib0", "ib0"),
        ("192.168.9.9", "", None),
        ("", "", None),
    ],
)
def test_gloo_uses_the_interface_with_the_nodes_address_unless_one_is_chosen(
    address, chosen, expected, monkeypatch
):
    def of(*addresses):
        return [SimpleNamespace(address=one) for one in addresses]

    interfaces = {
        "lo": of("127.0.0.1"),
        "tun0": of(""),
        "eth0": of("10.0.1.7"),
        "eth1": of("10.0.0.7"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setenv(INTERFACE, chosen)
    if not chosen:
        monkeypatch.delenv(INTERFACE)
    use_interface_of(address)
    assert os.environ.get(INTERFACE) == expected
    monkeypatch.delenv(INTERFACE, raising=False)
