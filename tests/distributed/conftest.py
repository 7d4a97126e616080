from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import RankPool


# One for all modules: to start four processes and to import Megatron in them takes seconds.
@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
