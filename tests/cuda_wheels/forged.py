"""Makes this process believe that it has H100s. For a separate process: nothing is undone."""

import contextlib

import torch

META = torch.device("meta")
GPUS = 8


class H100:
    """Result of ``torch.cuda.get_device_properties``."""

    name, major, minor = "NVIDIA H100 80GB HBM3", 9, 0
    total_memory, multi_processor_count, uuid = 80 * 2**30, 132, "GPU-0"
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0
    warp_size, regs_per_multiprocessor = 32, 65536
    shared_memory_per_block_optin = 227 * 1024


def forge_gpus():
    """Let ``torch.cuda`` answer for eight H100s."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: False
    cuda.device_count = lambda: GPUS
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *_: None
    cuda.get_device_capability = lambda *_: (H100.major, H100.minor)
    cuda.get_device_name = lambda *_: H100.name
    cuda.get_device_properties = lambda *_: H100


def forge_vllm():
    """Let vLLM take its CUDA platform; after :func:`forge_gpus`."""
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()


class _Nothing:
    """A stream or an event."""

    def __init__(self, *_, **__):
        self.device = META

    def __getattr__(self, _):
        return lambda *_, **__: None


@contextlib.contextmanager
def _nothing(*_, **__):
    yield


def forge_meta_device():
    """Let tensors that are made on ``cuda`` be meta tensors; after :func:`forge_gpus`."""
    from torch.overrides import TorchFunctionMode

    class CudaIsMeta(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.device:
                named = func(*args, **kwargs)
                return META if named.type == "cuda" else named
            if func is torch.Tensor.cuda:
                return args[0].to(META)
            if func is torch.Tensor.type and len(args) == 1:
                return func(args[0]).replace(".meta", "").replace("torch.", "torch.cuda.", 1)
            device = kwargs.get("device")
            if isinstance(device, int) or str(device).startswith("cuda"):
                kwargs["device"] = META
            args = tuple(META if _is_cuda(one) else one for one in args)
            return func(*args, **kwargs)

    CudaIsMeta().__enter__()
    cuda = torch.cuda
    state = torch.get_rng_state()
    cuda.is_initialized = lambda: True
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = cuda.device = _nothing
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_init"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.get_rng_state, cuda.set_rng_state = lambda *_, **__: state, lambda *_, **__: None
    import megatron.core.tensor_parallel.random as random

    replaced = random
    replaced._get_cuda_rng_state = lambda *_, **__: state
    replaced._set_cuda_rng_state = lambda *_, **__: None
    replaced.CudaRNGStatesTracker.fork = lambda self, *_, **__: _nothing()


def _is_cuda(value):
    named = isinstance(value, str) and value.startswith("cuda")
    return named or (isinstance(value, torch.device) and value.type == "cuda")
