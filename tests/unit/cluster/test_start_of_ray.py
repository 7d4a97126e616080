"""Ctrl-C and SIGTERM while Ray starts are acted on afterwards; a cluster that does not answer."""

import signal

import pytest
from ray.exceptions import AuthenticationError

from rlmath.cluster import session
from rlmath.config.schema import ClusterConfig
from rlmath.errors import UserError
from rlmath.utils.ending_signals import ending_by_exit


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_while_ray_starts_is_not_lost_in_a_fork_hook(number, error, monkeypatch):
    started = []

    def init(**_):
        try:
            signal.raise_signal(number)
        except BaseException:
            return  # As Python does with what a fork hook raises.
        started.append("whole")

    monkeypatch.setattr(session.ray, "init", init)
    guard = object()
    with ending_by_exit(), pytest.raises(error):
        session._start_own(ClusterConfig(), guard)
    assert started == ["whole"]


@pytest.mark.parametrize("error", [ConnectionError("no answer"), AuthenticationError("no token")])
def test_a_cluster_that_cannot_be_joined_is_named_and_not_tried_again(error, monkeypatch):
    """Ray's errors would count as failures of a part, after which a run restarts."""

    def init(**_):
        raise error

    monkeypatch.setattr(session.ray, "init", init)
    with pytest.raises(UserError, match=r"ray_address=head:6379.*RLMATH_SHARED_DIR"):
        session._join("head:6379")
