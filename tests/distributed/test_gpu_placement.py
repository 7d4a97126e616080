"""Placement of ranks and engine workers by Ray, on virtual nodes with GPUs that are not
there; see ``simulated_cluster.py`` for what is real and what stands in."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("simulated_cluster.py")
SEES = {"asks_what_an_engine_sees": True}


def case(placement, gpus, ranks, tp, engines, engine_tp, **more):
    return {
        "placement": placement,
        "bundles_of_nodes": gpus,
        "ranks": ranks,
        "tp": tp,
        "engines": engines,
        "engine_tp": engine_tp,
        **more,
    }


# Ray starts a process for each GPU of a case, so the plain command has few and small ones.
CASES = {
    "colocated, engines of 1": case("colocated", [2, 2], 4, 2, 4, 1),
    "colocated, engines of 2": case("colocated", [2, 2], 4, 2, 2, 2, **SEES),
    "separate, engines of 2": case("separate", [2, 2], 2, 2, 1, 2),
}
REFUSED = case("colocated", [2, 2], 4, 4, 4, 1)
# Each with one GPU of the first node broken; the second has as many.
SPARE = case("colocated", [2], 2, 2, 2, 1, broken=["host-0/1"])
NONE_SPARE = case("colocated", [4, 1], 5, 1, 5, 1, broken=["host-0/0", "host-0/1"])


def place_cases(cases, **environment):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(list(cases.values()))],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    return dict(zip(cases, json.loads(line.removeprefix("RESULT ")), strict=True))


@pytest.fixture(scope="module")
def bad_nodes(tmp_path_factory):
    """The file to which nodes with broken GPUs are written."""
    return tmp_path_factory.mktemp("bad") / "nodes"


@pytest.fixture(scope="module")
def placements(bad_nodes):
    """Output of the plain command's cases."""
    more = {"refused": REFUSED, "spare": SPARE, "none spare": NONE_SPARE}
    return place_cases({**CASES, **more}, RLMATH_BAD_NODES=str(bad_nodes))


def gpus_of(found):
    """(node, GPU) of each rank, and of each worker of each engine."""
    ranks = [(rank["node"], *rank["gpus"]) for rank in found["ranks"]]
    engines = [[(e["node"], gpu) for gpu in e["device_ids"]] for e in found["engines"]]
    return ranks, engines


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_engine_workers_get_gpus_node_by_node(placements, name):
    check(placements[name], CASES[name])


def check(given, wanted):
    """Compare the GPUs that Ray gave in one case with those asked for."""
    ranks, engines = gpus_of(given)
    # Ray did number the bundles across nodes.
    assert given["bundles"] != sorted(given["bundles"])
    assert len(ranks) == wanted["ranks"]
    assert [len(workers) for workers in engines] == [wanted["engine_tp"]] * wanted["engines"]
    # Node by node, in the order that Ray's addresses give; on each from the first GPU on.
    nodes = list(dict.fromkeys(node for node, _ in ranks))
    assert ranks == sorted(ranks, key=lambda rank: (nodes.index(rank[0]), rank[1]))
    groups = [ranks[i : i + wanted["tp"]] for i in range(0, len(ranks), wanted["tp"])]
    for group in groups + engines:
        assert len({node for node, _ in group}) == 1, group
        first = int(group[0][1])
        assert [int(gpu) for _, gpu in group] == list(range(first, first + len(group)))
    workers = list(itertools.chain(*engines))
    if wanted["placement"] == "colocated":
        # Engine k sits with ranks k x TP to (k + 1) x TP - 1.
        assert workers == ranks
    else:
        # In these cases each node has room for one of the two only.
        assert {node for node, _ in workers}.isdisjoint({node for node, _ in ranks})
    for engine in given["engines"]:
        # Ray gives an engine of one rank its GPU; a wider one names its own.
        assert engine["gpus"] == (engine["device_ids"] if wanted["engine_tp"] == 1 else [])


def test_a_wide_engine_sees_its_gpus_whatever_the_node_sets(placements):
    """The virtual nodes run with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1, as a cluster may."""
    visible = placements["colocated, engines of 2"]["visible"]
    assert visible["without"] == ""
    assert visible["with"] is None


def test_a_group_on_two_nodes_is_refused(placements):
    assert "2 + 2 GPUs" in placements["refused"]["refused"]


def test_a_node_with_a_broken_gpu_is_left_out_when_another_has_room(placements):
    """With a forged probe: no GPU is there that could fail. Ray offers the node again to each try,
    as its GPU is free."""
    ranks, _ = gpus_of(placements["spare"])
    assert placements["spare"]["bundles"] == [1, 1]
    assert [node for node, _ in ranks] == [1, 1]


def test_without_a_spare_node_host_gpu_and_xid_are_named_and_the_job_may_be_requeued(
    placements, bad_nodes
):
    """With a forged probe. launchers/slurm.sbatch requeues without the node at this exit code."""
    given = placements["none spare"]
    assert given["exit_code"] == 75
    assert "5 GPUs are needed" in given["refused"]
    for gpu in (0, 1):
        assert f"GPU {gpu} of host-0: forged fault (XID 79" in given["refused"]
    assert bad_nodes.read_text() == "host-0\n"
    assert placements["refused"]["exit_code"] == 2
