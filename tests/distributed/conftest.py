import pytest

from tests.distributed.rank_pool import RankPool
from tests.support.models import make_model


# Each module forks its own ranks: gloo's threads that a module leaves behind end with the
# processes.
@pytest.fixture(scope="module")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen2"), tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)
