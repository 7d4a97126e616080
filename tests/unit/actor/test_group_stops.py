"""The driver's side of ranks that are asked to stop."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from rlmath.actor.group import ActorGroup
from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_calls import ActorError, RankCalls
from rlmath.errors import UpdateStopped


def group_that_raises(error):
    group = ActorGroup.__new__(ActorGroup)
    group.changed = False

    def all_ranks(*_):
        assert group.changed
        raise error

    group._workers, group._dp, group._shares = [], [], []
    group._calls = SimpleNamespace(results=all_ranks)
    return group


def test_a_stopped_update_leaves_the_ranks_unchanged():
    for error, changed in ((UpdateStopped(), False), (ActorError("died"), True)):
        group = group_that_raises(error)
        with pytest.raises(type(error)):
            group.finish_step(StepPlan())
        assert group.changed is changed


def test_a_stopped_rank_has_not_failed(tmp_path):
    calls, error = RankCalls(str(tmp_path)), RayTaskError("update", "", UpdateStopped())
    assert isinstance(calls._explain(error, 0), UpdateStopped)
