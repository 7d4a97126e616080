"""What the dry run replaces or reads in torch and Megatron: private names, which may change."""

import pytest

from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
METER = "the dry run counts storages and answers for them (benchmarks/dry_run/meter.py)"
META_GPU = "the dry run plays a GPU with meta tensors (benchmarks/dry_run/meta_gpu.py)"

ROWS = [
    Row("torch:UntypedStorage._cdata", f"{METER}: a storage's identity"),
    Row("torch:ops.aten.copy_.default._schema", f"{METER}: which operators change their input"),
    Row("torch:ops.aten._local_scalar_dense.default", f"{METER}: item()"),
    Row("torch:ops.aten._to_copy.default", f"{METER}: copies between GPU and host"),
    Row("torch:autograd.Variable._execution_engine.run_backward", f"{META_GPU}: backward"),
    Row("torch.cuda:_lazy_init", f"{META_GPU}: CUDA is not initialized"),
    Row(
        "torch:ops.aten._scaled_dot_product_flash_attention",
        "what attention keeps in a dry run (benchmarks/dry_run/kernels.py)",
    ),
    Row(
        "megatron.core.distributed.param_and_grad_buffer",
        "collectives one by one in a dry run (benchmarks/dry_run/groups.py)",
        has=("_coalescing_manager",),
    ),
    Row(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        "shapes of a neighbor stage in a dry run (benchmarks/dry_run/rank.py)",
        passes=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
    ),
    Row(
        "megatron.core.tensor_parallel.random",
        f"{META_GPU}: random states",
        has=("_get_cuda_rng_state", "_set_cuda_rng_state", "CudaRNGStatesTracker"),
    ),
]


@parametrized(ROWS)
def test_dry_run(row):
    check(row)
