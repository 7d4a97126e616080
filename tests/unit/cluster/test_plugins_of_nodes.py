"""Plug-ins on the nodes of a cluster, before anything starts there. Nodes that lack one, with Ray:
tests/distributed/test_plugin_processes.py."""

from types import SimpleNamespace

import pytest

from rlmath.cluster import plugins
from rlmath.errors import UserError


def test_a_node_that_starts_no_process_is_named(monkeypatch):
    """As one whose disk is full. Ray would keep the task waiting, and the run with it."""
    nodes = [{"NodeID": 56 * one, "NodeManagerAddress": f"10.0.0.{one}"} for one in "12"]
    monkeypatch.setattr(plugins, "setup_hook", lambda: "hook")
    monkeypatch.setattr(plugins, "sorted_nodes", lambda: nodes)

    def options(scheduling_strategy, **_):
        return SimpleNamespace(remote=lambda: scheduling_strategy.node_id)

    monkeypatch.setattr("ray.remote", lambda _: SimpleNamespace(options=options))
    monkeypatch.setattr("ray.wait", lambda answers, **_: (answers[:1], answers[1:]))
    with pytest.raises(UserError, match=r"no process on 10\.0\.0\.2 in"):
        plugins.check_plugins()
