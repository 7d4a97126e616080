import pytest

from tests.distributed.rank_pool import RankPool
from tests.support.models import make_mixture, make_model


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


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """Logits of its routers are close, so that small changes of weights change routes."""
    return make_mixture(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def models(tiny_model, tied_model, mixture):
    return {"untied": tiny_model, "tied": tied_model, "mixture": mixture}
