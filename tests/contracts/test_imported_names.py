"""Every name that the code imports from vLLM, Megatron, Ray and transformers is in the installed
packages; what cannot be imported without CUDA is looked up in the source."""

import pytest

from tests.contracts import contract
from tests.contracts.imports import imported_names

# Megatron warns of what a CPU machine lacks when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = imported_names()


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part or "(module)")
def test_imported_name_exists(module, name):
    assert contract.reachable(module, name), (
        f"{module} has no {name}, which {', '.join(NAMES[module, name])} imports"
    )


def test_the_walk_sees_imports_within_functions_and_attributes():
    assert ("vllm.engine.arg_utils", "EngineArgs") in NAMES
    assert ("megatron.core.optimizer", "get_megatron_optimizer") in NAMES
    assert ("ray", "util.get_node_ip_address") in NAMES
    assert ("megatron.core.parallel_state", "get_tensor_model_parallel_rank") in NAMES
    assert len(NAMES) > 150


def test_missing_imported_name_is_detected():
    assert not contract.reachable("vllm.engine.arg_utils", "NoSuchArgs")
    assert not contract.reachable("vllm.no_such_module", "")
    assert not contract.reachable("megatron.core.parallel_state", "get_no_such_rank")
    # CUDA only: in the source alone.
    assert contract.reachable("vllm.distributed.weight_transfer.ipc_engine", "IPCTrainerInitInfo")
    assert not contract.reachable("vllm.distributed.weight_transfer.ipc_engine", "NoSuchInfo")
