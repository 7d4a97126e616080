"""A collector with a small reward, and the settings of an engine on a Megatron rank's GPU."""

import pytest

from rlmath.engines.requests import EngineSpec
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.rollout.collect import Collector
from tests.support.fake_engines import score


@pytest.fixture(scope="module")
def collector():
    with RewardMix([MixItem(FunctionReward(score, "small"), "small")], answer_grader=None) as mix:
        made = Collector(mix)
        yield made
        made.close()


@pytest.fixture
def gpu_spec():
    return EngineSpec(
        model_path="model",
        dtype="bfloat16",
        device="cuda",
        tensor_parallel=1,
        max_sequence_tokens=400,
        max_running_sequences=256,
        transport="ipc",
        log_dir="logs",
        sleeps=True,
    )
