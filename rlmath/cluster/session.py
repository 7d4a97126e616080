"""Starting and joining Ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray.exceptions import AuthenticationError

from rlmath.cluster.guard import Guard
from rlmath.cluster.plugins import check_plugins
from rlmath.config.schema import ClusterConfig
from rlmath.errors import UserError
from rlmath.plugins.loading import setup_hook
from rlmath.utils.ending_signals import on_ending_signals, signals_wait

# Time for which Ray's processes, the driver included, look for a dead head before they end.
RECONNECT_TIMEOUT_S = "5"
# Ranks and engines import from disks that may be shared and slow; Ray's own limit is a minute.
REGISTER_TIMEOUT_S = "300"
HEAD_POLL_S = 0.05
# Ray's shutdown ends its head among the last.
SHUTDOWN_TIMEOUT_S = 2.0


@contextlib.contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Ray for the length of a run: the cluster at ``ray_address``, or a new one on this machine.

    A cluster that rlmath starts listens on the loopback interface only and ends with the run, even
    if the driver is killed. One that was started apart listens where its starter chose. Raises
    UserError: there is no cluster at the address, or a node lacks a plug-in.
    """
    # Ray turns authentication on automatically where it finds a token; nodes that differ in that
    # cannot talk to each other, so it is set explicitly unless the user has set it.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_log_ray_errors())
        if config.ray_address is None:
            guard = Guard()
            stack.callback(guard.close)
            _start_own(config, guard)
        else:
            _join(config.ray_address)
        over = threading.Event()
        stack.callback(over.set)
        stack.callback(ray.shutdown)
        asked = _end_on_signals(over)
        try:
            check_plugins()
            yield
        except SystemExit:
            # While Ray waits, it lets a handler's exit through with the code 1.
            if asked:
                raise SystemExit(asked[0]) from None
            raise


def _start_own(config: ClusterConfig, guard: Guard) -> None:
    # Ray replaces a loopback address by the machine's own, and then listens on all of its
    # interfaces, unless it takes the machine for one that cannot be in a cluster.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", RECONNECT_TIMEOUT_S)
    # Workers that Ray starts ahead have no variables of ours, so no rank or engine could use them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", REGISTER_TIMEOUT_S)
    # Ranks and engines ask for no CPUs of Ray's: how many run is the layout's business.
    # Ray forks with Python hooks, which swallow exceptions of a signal's handler.
    with signals_wait("the start of Ray"), _out_of_our_process_group(), without_services():
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            runtime_env=_imports_plugins(),
            object_store_memory=(config.object_store_mib or 0) * 2**20 or None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
        )
    guard.watch(process.pid for kind in _own_processes().values() for process in kind)


def _join(address: str) -> None:
    try:
        ray.init(
            address=address,
            runtime_env=_imports_plugins(),
            log_to_driver=False,
            logging_level="warning",
        )
    except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
        raise UserError(
            f"cluster.ray_address={address}: no Ray cluster answers there "
            f"({str(error).strip().splitlines()[0]}); start one, or set it to null to run on "
            "this machine only. A cluster from ray_utils/start_ray.sh needs its token: "
            "launchers/run_math_grpo.sh sets it, given the same RLMATH_SHARED_DIR and "
            "RLMATH_RUN_ID."
        ) from error


def _imports_plugins() -> dict[str, Any] | None:
    """Ray's runtime environment for processes that first import this one's plug-ins."""
    hook = setup_hook()
    return None if hook is None else {"worker_process_setup_hook": hook}


@contextlib.contextmanager
def _log_ray_errors() -> Iterator[None]:
    """Send Ray's reports of dead workers to its logger at level INFO instead of stdout.

    The owner of a worker reports its death with the end of its log, and ranks and engines ended on
    purpose at the end of a run are no news.
    """
    printed = ray_worker.print_to_stdstream

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        logging.getLogger("ray").info("%s: %s", data["pid"], "\n".join(data["lines"]))

    ray_worker.print_to_stdstream = log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = printed


@contextlib.contextmanager
def _out_of_our_process_group() -> Iterator[None]:
    """Start Ray's processes, and thus ranks and engines, in their own process groups.

    A terminal's Ctrl-C, ``timeout`` and batch systems signal the whole group, and the run cannot
    save when its ranks and Ray's head are hit along with the driver. They still end with the
    driver: it ends them, or the kernel does when it is killed.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, process_group=0)  # type: ignore[misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


@contextlib.contextmanager
def without_services() -> Iterator[None]:
    """Keep Ray from starting processes that a run does not use: autoscaler, dashboard, and the
    one that forwards workers' output to the driver, as ranks and engines write to files. Each
    imports Ray for seconds while the run waits.
    """
    names = ("start_monitor", "start_log_monitor", "start_api_server")
    started = {name: getattr(ray_node.Node, name) for name in names}

    def none(node: ray_node.Node, **_: Any) -> None:
        # The start of the dashboard would have set this.
        node._webui_url = None

    for name in names:
        setattr(ray_node.Node, name, none)
    try:
        yield
    finally:
        for name, start in started.items():
            setattr(ray_node.Node, name, start)


def _end_on_signals(over: threading.Event) -> list[int]:
    """Unwind the run on signals that end it, as Ctrl-C does; Ray's own handler of SIGTERM would
    end it at once. Returns a list that holds the exit code once a signal has come."""
    asked: list[int] = []
    head = next(iter(_own_processes().get(ray_constants.PROCESS_TYPE_GCS_SERVER, [])), None)

    def end(number: int, frame: FrameType | None) -> None:
        code = 128 + number
        asked.append(code)
        if head is not None:
            threading.Thread(target=_end_with, args=(head, over, code), daemon=True).start()
        sys.exit(code)

    on_ending_signals(end)
    return asked


def _own_processes() -> dict[str, list[subprocess.Popen[bytes]]]:
    node = ray._private.worker._global_node
    kinds = {} if node is None else node.all_processes
    return {kind: [info.process for info in infos] for kind, infos in kinds.items()}


def _end_with(head: subprocess.Popen[bytes], over: threading.Event, code: int) -> None:
    """End this process after a signal also ended Ray's head: no call of a rank returns any more,
    and Ray would end this process with its own code. ``head``: ends in time when the run's own
    shutdown told it to. ``over``: set when that shutdown is complete."""
    while head.poll() is None:
        time.sleep(HEAD_POLL_S)
    if not over.wait(SHUTDOWN_TIMEOUT_S):
        print(
            "interrupted, and Ray with it; runner.resume=auto resumes from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)
