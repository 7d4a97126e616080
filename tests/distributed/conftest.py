from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
