"""One engine's process as the driver sees it: made, started, asked, and ended, whatever state it is
in."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rlmath.cluster.failures import describe_failure
from rlmath.cluster.logs import end_of
from rlmath.cluster.nodes import has_left
from rlmath.cluster.nsys import under_nsys
from rlmath.cluster.placement import EnginePlace
from rlmath.cluster.processes import ProcessPlace, end_actors
from rlmath.config.profile import ProfileTool
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.requests import EngineError, EngineSpec

# How often the node of an engine that is starting is looked for.
LOOK_EVERY_S = 5.0


class EngineProcess:
    """The Ray actor of one engine. Once made it imports what it needs, and touches no GPU before
    ``start``. ``index``: its number in the pool. ``start_timeout_s``: seconds that it may take to
    start."""

    def __init__(
        self, spec: EngineSpec, index: int, place: EnginePlace, start_timeout_s: float
    ) -> None:
        spec = dataclasses.replace(spec, device_ids=place.device_ids)
        environment, profile = spec.environment(), spec.profile
        runtime_env: dict[str, Any] = {"env_vars": environment}
        if profile is not None and profile.tool is ProfileTool.nsys:
            runtime_env = under_nsys(profile.folder / f"{spec.role}_{index}", environment)
        actor = ray.remote(RolloutEngine).options(
            **{
                "num_cpus": 0,
                # Updates come from the trainer while the pool may be waiting for samples.
                "max_concurrency": 8,
                "max_restarts": 0,
                "runtime_env": runtime_env,
                **place.options,
            }
        )
        self.spec, self.index = spec, index
        self.start_timeout_s = start_timeout_s
        self.handle: Any = actor.remote(spec, index, environment)  # Ray's handle of the actor.
        self._place_ref = self.handle.place.remote()
        # Whatever goes wrong with its imports, its start says.
        self.handle.prepare.remote()
        self.starting: Any = None  # The answer to start that is still waited for; None: none is.
        # It has started again and can sample only after the next weight sync.
        self.waits_for_weights = False
        self.has_sampled = False  # It has given a token.
        self._deadline_s = self._next_look_s = 0.0
        self._node = place.node

    def start(self) -> None:
        """Let it load the model, on its GPUs; returns at once."""
        self.starting = self.handle.start.remote()
        self._deadline_s = time.monotonic() + self.start_timeout_s

    def finish_start(self) -> int | None:
        """Take the answer to ``start``, which must be there. Returns bytes of each rank's KV cache;
        ``None`` where vLLM does not measure it (CPU). Raises EngineError: it could not start."""
        ref, self.starting = self.starting, None
        found: int | None = self.get(ref, "could not start")
        return found

    def check_start_time(self) -> None:
        """Raises EngineError when it is starting and has had its time; or when its node is lost,
        for whose GPU Ray would wait."""
        if self.starting is None:
            return
        now_s, reason = time.monotonic(), ""
        if now_s > self._deadline_s:
            reason = f"was not ready after {self.start_timeout_s:g} s"
        elif now_s > self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            if has_left(self._node):
                reason = "cannot start: its node is no longer in the Ray cluster"
        if reason:
            raise EngineError(f"{self.spec.role} {self.index} {reason}" + self.end_of_log())

    @property
    def can_sample(self) -> bool:
        """Whether it has started and has the current weights."""
        return self.starting is None and not self.waits_for_weights

    def place(self) -> ProcessPlace | None:
        """Where its process is; ``None`` when it died before it could say."""
        try:
            found: ProcessPlace = ray.get(self._place_ref, timeout=0.2)
        except (RayError, GetTimeoutError):
            return None
        return found

    def get(self, ref: Any, what: str = "failed") -> Any:
        """An answer of the engine. Raises EngineError: it failed; the message has its reason and
        the end of its log."""
        try:
            return ray.get(ref)
        except RayError as error:
            message = f"{self.spec.role} {self.index} {what}: {describe_failure(error)}"
            message += self.end_of_log()
            raise EngineError(message, raised=isinstance(error, RayTaskError)) from error

    def kill(self) -> None:
        """End the process at once, also one that is stopped or hangs, and its workers."""
        end_actors([self.handle], [self.place()], have_children=self.spec.tensor_parallel > 1)

    def end_of_log(self) -> str:
        """The last lines of its output, for an error message."""
        return end_of(self.spec.log_path(self.index))
