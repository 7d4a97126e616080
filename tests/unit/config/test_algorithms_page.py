"""``docs/algorithms.md`` has every setting of the algorithm, every name and every preset."""

import re
from pathlib import Path

from rlmath.algorithms.advantages import ADVANTAGES, VALUE_ADVANTAGES
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.kl import KL_ESTIMATORS
from rlmath.algorithms.losses import LOSSES
from rlmath.config.groups import options
from rlmath.config.settings import settings

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
WRITTEN = set(re.findall(r"[a-z_0-9.]+", " ".join(re.findall(r"`([^`]+)`", PAGE))))


def test_every_setting_is_there() -> None:
    keys = [s.key for s in settings() if s.key.startswith("algorithm.")]
    missing = [
        key
        for key in keys
        if not {key, key.removeprefix("algorithm."), key.rsplit(".", 1)[1]} & WRITTEN
    ]
    assert missing == []


def test_every_choice_is_there() -> None:
    for registry in (ADVANTAGES, VALUE_ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES):
        assert set(registry.names()) <= WRITTEN
    for setting in settings():
        if setting.key.startswith("algorithm.") and setting.choices:
            assert set(setting.choices) <= WRITTEN, setting.key
    assert {*options("algorithm"), *options("recipe")} <= WRITTEN
