"""When the ranks' weights come back from host memory at a step's begin."""

from types import SimpleNamespace

import pytest

from rlmath.config.rollout import RolloutConfig
from rlmath.training.group_source import GroupSource


@pytest.mark.parametrize("groups", [(), ("a group",)])
def test_weights_come_back_when_engines_sleep(groups):
    """Not before, as they would not fit; and not for a step that trains nothing."""
    events = []
    pool = SimpleNamespace(sleep=lambda: events.append("sleep"))
    rewards = SimpleNamespace(set_step=lambda *_: None)
    session = SimpleNamespace(
        config=SimpleNamespace(runner=SimpleNamespace(steps=1), rollout=RolloutConfig()),
        sampling=SimpleNamespace(pool=pool, rewards=rewards),
        actor=SimpleNamespace(begin_load=lambda: events.append("load")),
    )
    sampled = SimpleNamespace(groups=groups)
    sampler = SimpleNamespace(is_sampled=True, take=lambda _: events.append("take") or sampled)
    monitor = None
    assert GroupSource(session, sampler, monitor).take(1) is sampled
    assert events == ["take", "sleep", *(["load"] if groups else [])]
