import pytest

from tests.distributed.rank_pool import RankPool


# Of each module its own, which costs a fork: what a module leaves of gloo's threads ends with the
# processes.
@pytest.fixture(scope="module")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()
