"""Ctrl-C and SIGTERM while Ray starts are acted on afterwards."""

import signal

import pytest

from rlmath.cluster import session
from rlmath.config.schema import ClusterConfig
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
