"""Starting and joining Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import ray
from ray._private import ray_constants

from rlmath.config.schema import ClusterConfig
from rlmath.errors import UserError


@contextlib.contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Ray for the length of a run: the cluster at ``ray_address``, or one of this machine alone.

    One of our own listens on the loopback interface only and ends with the run. A cluster that was
    started apart listens where whoever started it said.

    Raises:
        UserError: There is no cluster at the address.
    """
    # Ray turns authentication on by itself where it finds a token; nodes that differ in that
    # cannot talk to each other, so it is said outright unless the user has said it.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if config.ray_address is None:
        # Ray's processes look so long for a head that has died, and then end; the driver among
        # them, so it has to be long enough to save after a signal to all.
        # Ray replaces a loopback address by the machine's own, and then listens on all of its
        # interfaces, unless it takes the machine for one that cannot be in a cluster.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
        # Ranks and engines ask for no CPUs of Ray's: how many run is the layout's business.
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            object_store_memory=(config.object_store_mib or 0) * 2**20 or None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
        )
    else:
        try:
            ray.init(address=config.ray_address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cluster.ray_address={config.ray_address}: no Ray cluster answers there "
                f"({str(error).strip().splitlines()[0]}); start one, or set it to null to run on "
                "this machine alone."
            ) from error
    _end_on_sigterm()
    try:
        yield
    finally:
        ray.shutdown()


def _end_on_sigterm() -> None:
    """Let SIGTERM unwind the run as Ctrl-C does; Ray's own handler would end it at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
