"""GPUs of each rank and each engine, from the bundles that Ray reserved."""

import dataclasses

import pytest

from rlmath.cluster.placement import Bundle, assign, in_order
from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Device, Placement
from rlmath.errors import UserError
from rlmath.model.parallel import Layout


def layout(placement, ranks, tp, engines, engine_tp):
    return RunLayout(
        device=Device.cuda,
        placement=placement,
        actor=Layout(tp, 1, ranks // tp),
        engines=engines,
        engine_tensor_parallel=engine_tp,
        accelerators=0,
    )


def nodes(*gpus):
    """GPUs of each node, with bundles numbered across the nodes, as Ray may number them."""
    of_nodes = [[] for _ in gpus]
    index = 0
    for gpu in range(max(gpus)):
        for node, count in enumerate(gpus):
            if gpu < count:
                of_nodes[node].append(Bundle(index, f"n{node}", str(gpu)))
                index += 1
    return of_nodes


def names(bundles):
    return [f"{bundle.node}.{bundle.gpu}" for bundle in bundles]


def test_colocated_an_engine_sits_on_the_gpus_of_the_ranks_at_its_place():
    ranks, engines, _ = assign(layout(Placement.colocated, 8, 2, 4, 2), nodes(4, 4))
    assert names(ranks) == [f"n{node}.{gpu}" for node in range(2) for gpu in range(4)]
    assert [bundle for of_engine in engines for bundle in of_engine] == ranks
    _, wide, _ = assign(layout(Placement.colocated, 8, 2, 2, 4), nodes(4, 4))
    assert [names(of_engine) for of_engine in wide] == [
        [f"n{node}.{gpu}" for gpu in range(4)] for node in range(2)
    ]


def test_bundles_are_sorted_by_node_and_by_the_number_of_the_gpu():
    bundles = [Bundle(0, "b", "2"), Bundle(1, "a", "10"), Bundle(2, "b", "0"), Bundle(3, "a", "9")]
    assert [names(of_node) for of_node in in_order(bundles, ["idle", "b", "a"])] == [
        ["b.0", "b.2"],
        ["a.9", "a.10"],
    ]
    uuids = [Bundle(0, "a", "GPU-f"), Bundle(1, "a", "GPU-b")]
    assert names(in_order(uuids, ["a"])[0]) == ["a.GPU-b", "a.GPU-f"]


def test_separate_no_gpu_is_given_twice_and_the_wider_groups_choose_first():
    """6 + 6 GPUs hold 2 groups of 4 and 2 of 2 only when the groups of 4 choose first."""
    for tp, engine_tp in ((4, 2), (2, 4)):
        made = layout(Placement.separate, 2 * tp, tp, 2, engine_tp)
        ranks, engines, none = assign(made, nodes(6, 6))
        assert none == []
        groups = [ranks[i : i + tp] for i in range(0, len(ranks), tp)] + engines
        assert all(len({bundle.node for bundle in group}) == 1 for group in groups)
        used = [bundle for group in groups for bundle in group]
        assert len(set(used)) == len(used) == 12


@pytest.mark.parametrize(
    ("placement", "gpus", "ranks", "engines"),
    [
        (Placement.colocated, (6, 4), 6, 3),  # The teacher's 4 before groups of 2.
        (Placement.separate, (6, 4), 4, 1),
    ],
)
def test_a_teacher_has_gpus_that_nobody_else_has(placement, gpus, ranks, engines):
    made = dataclasses.replace(
        layout(placement, ranks, 2, engines, 2), teacher_engines=1, teacher_tensor_parallel=4
    )
    actor, own, (of_teacher,) = assign(made, nodes(*gpus))
    assert len(of_teacher) == 4 and len({bundle.node for bundle in of_teacher}) == 1
    others = {*actor, *(bundle for one in own for bundle in one)}
    assert len(others) == 6 and not others & set(of_teacher)
    alone = dataclasses.replace(made, teacher_tensor_parallel=8)
    with pytest.raises(UserError, match=r"teacher.tensor_parallel=8: 1 groups of 8"):
        assign(alone, nodes(*gpus))


def test_a_group_on_two_nodes_is_refused_with_the_figures():
    with pytest.raises(UserError) as caught:
        assign(layout(Placement.colocated, 8, 4, 8, 1), nodes(5, 3))
    for part in ("actor.tensor_parallel=4", "2 groups of 4", "5 + 3 GPUs", "1 + 0 = 1"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel=4.* 6 \+ 2 GPUs .* 1 \+ 0 = 1"):
        assign(layout(Placement.colocated, 8, 2, 2, 4), nodes(6, 2))
