"""Reasons of failed calls: Ray's, with the node; an actor that may still run is not dead."""

from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    RayActorError,
    RayTaskError,
)

from rlmath.cluster.failures import describe_failure
from rlmath.cluster.logs import LINE_LENGTH


def death(message):
    context = ActorDiedErrorContext(
        error_message=message,
        actor_id=bytes(16),
        class_name="ActorWorker",
        node_ip_address="10.0.0.5",
        pid=4711,
    )
    return describe_failure(ActorDiedError(context))


def test_a_dead_actor_has_rays_reason_and_node_in_one_line():
    said = death("The actor is dead because its node has died.\nNode Id: 12ab")
    reason = "The actor is dead because its node has died. Node Id: 12ab"
    assert said == f"its process ended on 10.0.0.5: {reason}"
    assert len(death("memory " * 999)) < LINE_LENGTH + 50
    assert describe_failure(RayActorError()) == "its process ended"
    assert describe_failure(ActorDiedError()) == "its process ended"


def test_an_actor_that_cannot_be_reached_is_not_called_dead():
    error = ActorUnavailableError("RpcError: Socket closed rpc_code: 14", bytes(16))
    said = describe_failure(error)
    assert "may still run" in said and "Socket closed rpc_code: 14" in said
    assert "ended" not in said and "\n" not in said


def test_a_constructor_that_raised_gives_its_error_without_the_traceback():
    task = RayTaskError("ActorWorker.__init__", "Traceback\n  deep\nOSError: no disk", OSError("x"))
    assert describe_failure(ActorDiedError(task)).endswith("ended: OSError: no disk")


def test_other_failures():
    cause = ValueError("no batch")
    assert describe_failure(RayTaskError("update", "traceback", cause)) == "ValueError: no batch"
    assert describe_failure(GetTimeoutError()) == "it did not answer in time"
    assert describe_failure(NodeDiedError("the node\nwas lost")) == "the node was lost"
