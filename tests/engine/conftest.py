"""One Ray session and one pool of two engines for all engine tests: both are slow to start."""

from dataclasses import replace

import pytest
import ray
import sender as sender_module
from reference import Reference
from trainers import start_sender

from rlmath.cluster.session import ray_session as own_ray
from rlmath.config.schema import ClusterConfig
from rlmath.engines.requests import EngineSpec
from rlmath.model.tiny import make_tiny_model
from rlmath.rollout.pool import RolloutPool


@pytest.fixture(scope="session")
def ray_session():
    # Actors cannot import test files; let the class travel whole.
    ray.cloudpickle.register_pickle_by_value(sender_module)
    with own_ray(ClusterConfig(object_store_mib=100)):
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_spec(model_folder, tmp_path_factory):
    return EngineSpec(
        model_path=str(model_folder),
        dtype="float32",
        device="cpu",
        tensor_parallel=1,
        max_sequence_tokens=512,
        max_running_sequences=32,
        transport="shared_memory",
        log_dir=str(tmp_path_factory.mktemp("logs")),
        cpu_kv_cache_gib=0.125,
    )


@pytest.fixture(scope="session")
def pool(ray_session, engine_spec):
    with RolloutPool(engine_spec, num_engines=2, stall_timeout_s=120) as pool:
        yield pool


@pytest.fixture(scope="session")
def reference(model_folder):
    return Reference(model_folder)


@pytest.fixture(scope="session")
def sender(pool, reference):
    """Sends the reference's weights, or others', to the session's pool."""
    return start_sender(pool, reference)


@pytest.fixture
def log_dir_spec(engine_spec, tmp_path):
    """The same settings, with separate logs."""
    return replace(engine_spec, log_dir=str(tmp_path))
