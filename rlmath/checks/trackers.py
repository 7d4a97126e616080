"""Whether the chosen trackers are there, and the port of the metrics is free."""

from __future__ import annotations

import difflib
import importlib.util
import socket
from collections.abc import Iterator

from rlmath.config.schema import Config
from rlmath.monitor.trackers import PACKAGES

TRACKERS = ("tensorboard", *PACKAGES)


def tracker_problems(config: Config) -> Iterator[str]:
    """What is wrong with ``runner.trackers`` and ``runner.metrics_port``."""
    chosen = config.runner.trackers
    for name in chosen:
        if name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            known = ", ".join(TRACKERS)
            yield f"runner.trackers: there is no tracker {name}; there are {known}{hint}"
        elif name in PACKAGES and importlib.util.find_spec(name) is None:
            yield (
                f"runner.trackers: {name} needs the package {PACKAGES[name]}, which is not "
                f"installed: pip install {PACKAGES[name]}; tensorboard needs nothing more"
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
