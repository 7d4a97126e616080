"""A few healthy steps on real ranks, and faults of a MoE's routers and of the objective in them.

``python -m tests.distributed.healthy_steps`` runs hundreds of each family, layout and recipe.
"""

import re

import pytest

from rlmath.commands.drill import in_routers, in_update
from tests.distributed import blind_faults
from tests.distributed.blind_faults import PLAIN, WITH_ENTROPY, WITH_KL
from tests.distributed.healthy_steps import CASES, Case, run
from tests.distributed.rank_pool import RankPool

SIGMOID = "MoE, sigmoid, EP 2"


@pytest.mark.parametrize(
    "name",
    [
        # Checks would end runs of the command line too: tests/e2e/test_schedule_runs.py and
        # test_plugins_run.py.
        *(pytest.param(name, marks=pytest.mark.long) for name in ("continuous", "distill")),
        "tools, value model",
        "DP 2, overlapped and offloaded",
        pytest.param("PP 2, virtual stages, overlapped", marks=pytest.mark.long),
        SIGMOID,
    ],
)
def test_no_check_says_anything_of_healthy_steps(ranks, name):
    assert run(ranks, CASES[name], 3) == []


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (in_routers.drop_a_routers_gradient, r"router\.weight.*adds nothing"),
        (in_routers.freeze_the_routers, r"single bit of .*mlp\.gate\.weight"),
        (in_routers.move_expert_biases, "frozen have changed: .*e_score_correction_bias"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_fault_of_a_router_is_named_in_its_step(ranks, plant, says):
    said = run(ranks, CASES[SIGMOID], 3, plant)
    assert said and re.search(says, said[0]) and said[0].startswith("step 2:")


@pytest.mark.parametrize(
    ("plant", "words", "says"),
    [
        (in_update.take_other_log_probs, PLAIN, "minibatch 1.*they add up to"),
        (in_update.detach_the_kl, WITH_KL, "minibatch 0.*by the log-probs"),
        (blind_faults.old_log_probs_of_another_sequence, PLAIN, "minibatch 1.*by the log-probs"),
        (blind_faults.entropy_without_gradient, WITH_ENTROPY, "minibatch 0.*by the entropies"),
        (blind_faults.advantages_fade, PLAIN, "minibatch 0.*weighted by their place"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_fault_of_the_objective_is_named_in_its_step(plant, words, says):
    pool = RankPool()  # Some faults stay in a process.
    try:
        said = run(pool, Case(words=words), 2, plant)
    finally:
        pool.close()
    assert said and re.search(f"step 2: .*{says}", said[0])
