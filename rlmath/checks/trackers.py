"""Whether the chosen trackers are installed, and the port of the metrics is free."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator

from rlmath.config.schema import Config
from rlmath.monitor.trackers import TRACKERS
from rlmath.plugins.source import split
from rlmath.utils.close_names import did_you_mean


def tracker_problems(config: Config) -> Iterator[str]:
    chosen = config.runner.trackers
    for name in chosen:
        if not TRACKERS.has(name):
            if split(name)[1]:
                yield from TRACKERS.problems(name)
                continue
            hint = did_you_mean(name, TRACKERS.names())
            known = ", ".join(TRACKERS.names())
            yield (
                f"runner.trackers: there is no tracker {name}; there are {known}, or "
                f"file.py:YourTracker{hint}"
            )
            continue
        package = TRACKERS.traits(name).package
        if package is not None and importlib.util.find_spec(package) is None:
            yield (
                f"runner.trackers: {name} needs the package {package}, which is not "
                f"installed: pip install {package}; tensorboard needs nothing more"
            )
    host, port = config.runner.metrics_host, config.runner.metrics_port
    if port and (said := _not_to_be_had(host, port)):
        yield f"runner.metrics_port={port}: {host}:{port} cannot be listened at ({said})"


def _not_to_be_had(host: str, port: int) -> str:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return str(error.strerror or error)
    return ""
