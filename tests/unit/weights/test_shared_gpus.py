"""Which ranks serve which engine with ``ipc``; at 1,000 GPUs each engine gets its own handles."""

from __future__ import annotations

import pickle

import pytest

from rlmath.errors import WeightsError
from rlmath.weights.transports.shared_gpus import serving_ranks


def gpus(count: int) -> list[str]:
    return [f"GPU-{number:032x}" for number in range(count)]


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("count", [8, 1000])
def test_each_engine_is_served_by_the_ranks_on_its_gpus_alone(count: int, width: int) -> None:
    names = gpus(count)
    engine_gpus = [names[i : i + width] for i in range(0, count, width)]
    served = serving_ranks(names, engine_gpus)
    assert [rank for ranks in served for rank in ranks] == list(range(count))
    # A handle of a GPU is 8 fields with two of 64 bytes; what an engine is sent of a bucket does
    # not grow with the number of GPUs.
    sent = [{names[rank]: (bytes(64), bytes(64), *range(6)) for rank in ranks} for ranks in served]
    assert [list(handles) for handles in sent] == engine_gpus
    assert max(len(pickle.dumps(handles)) for handles in sent) < 300 * width


def test_ranks_without_an_engine_and_engines_in_any_order() -> None:
    names = gpus(8)
    assert serving_ranks(names, [[names[5], names[4]], [names[0], names[1]]]) == [(5, 4), (0, 1)]


def test_a_worker_without_a_rank_and_ranks_that_share_a_gpu_are_refused() -> None:
    with pytest.raises(WeightsError, match="engine 1 has workers on GPU-x"):
        serving_ranks(gpus(2), [gpus(1), ["GPU-x"]])
    with pytest.raises(WeightsError, match="3 trainer ranks have 2 GPUs"):
        serving_ranks([*gpus(2), *gpus(1)], [gpus(2)])
