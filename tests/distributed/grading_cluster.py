"""Grades on the nodes of engines in a Ray cluster of three virtual nodes, of which two are lost.

What stands in: the nodes are raylets of this machine, and actors that say where they are take the
place of engines. Prints one JSON object.
"""

import json
import os
import resource
import signal
import threading

os.environ["RAY_AUTH_MODE"] = "disabled"

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmath.cluster.grading_nodes import node_workers
from rlmath.cluster.processes import own_place
from rlmath.cluster.session import without_services
from rlmath.grading import MathGrader

ENDLESS = "\\boxed{\\int_0^1 \\frac{\\sin^{50}(x^3)}{1+x^7} dx}"
NAMES = "abcdhkmnpqstuvwxyz"
SOON = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}


class Engine:
    """Takes the place of an engine's actor."""

    def place(self):
        return own_place()


def main():
    cluster = Cluster()
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    with without_services():
        cluster.add_node(_system_config=SOON, **small)
        others = [cluster.add_node(**small) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        print("RESULT " + json.dumps(grade_and_lose_nodes(cluster, others)))
    finally:
        ray.shutdown()
        cluster.shutdown()


def grade_and_lose_nodes(cluster, others):
    """The grades of each part, and what was seen of the workers."""
    # Without an engine on the head.
    engines = [
        ray.remote(Engine)
        .options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        )
        .remote()
        for node in [*others, others[0]]
    ]
    found = {}
    settings = {"cache_size": 0, "audit_fraction": 0.0}
    with MathGrader(2, 1.0, **settings) as grader:
        found["expected"] = grades(grader, "one", ENDLESS)
    with MathGrader(2, 1.0, **settings) as grader:
        workers = node_workers(grader.settings, engines, 2)
        grader.use_workers(workers)
        found["on nodes"] = grades(grader, "one", ENDLESS)
        found["done"] = [workers.done[node.node_id] for node in others]
        found["memory"] = sorted({worker.rlimit(resource.RLIMIT_AS)[0] for worker in processes()})
        found["here"] = len(workers.pids())
        actors = [node.actor for node in workers._nodes]
        pid = ray.get(actors[0].__ray_call__.remote(lambda _: os.getpid()))
        found["an actor dies"] = grades(grader, "two", None, lambda: os.kill(pid, signal.SIGKILL))
        # A thread that has no job yet waits for one before it sees that its node came back.
        found["restarts"] = [node.restarts for node in workers._nodes]
        for which, node in enumerate(others):
            part = ("a node is lost", "both nodes are lost")[which]

            def lose(node=node):
                cluster.remove_node(node, allow_graceful=False)

            found[part] = grades(grader, part, None, lose)
        found["at last"] = grades(grader, "after", None)
        found["here at last"] = len(workers.pids())
        late = workers.submit({"answer": "1", "gold": "1", "task": "math"})
        workers.close()
        found["late"] = late.result(timeout=30).reply
        found["closed"] = workers.submit({}).result(timeout=1).reply
    found["left"] = len(processes())
    return found


def grades(grader, part, first, meanwhile=None):
    """Grade many answers that only workers can compare, every third of them wrong.

    Args:
        grader: Grader to call.
        part: In all answers, so that no two parts ask the same.
        first: An answer before them that takes too long.
        meanwhile: Called when the first grades are there.
    """
    letters = sum(map(ord, part)) % 7 + 2
    responses = [] if first is None else [first]
    golds = [] if first is None else ["\\frac{1}{3}"]
    for number, name in enumerate(NAMES):
        responses.append(
            f"\\boxed{{\\sum_{{j=1}}^1 \\sin^2 ({letters}{name}) + \\cos^2 ({letters}{name})}}"
        )
        golds.append("1" if number % 3 else "2")
    futures = [grader.submit(r, g) for r, g in zip(responses, golds, strict=True)]
    if meanwhile is not None:
        futures[1].result(timeout=120)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
    found = [future.result(timeout=120) for future in futures]
    return [[one.correct, one.status, one.gold, one.method] for one in found]


def processes():
    """The worker processes of graders on this machine."""
    servers = [
        one
        for one in psutil.Process().children(recursive=True)
        if any("rlmath.grading.forkserver" in word for word in one.cmdline())
    ]
    return [worker for server in servers for worker in server.children()]


if __name__ == "__main__":
    main()
