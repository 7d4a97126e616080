"""A few healthy steps on real ranks, and faults of a MoE's routers and of the objective in them.

``python -m tests.distributed.healthy_steps`` runs hundreds of each family, layout and recipe.
"""

import re

import pytest

from rlmath.commands.drill import in_routers
from tests.distributed import blind_faults
from tests.distributed.healthy_steps import CASES, Case, run

SIGMOID = "MoE, sigmoid, EP 2"


@pytest.mark.parametrize("name", ["continuous", "tools, value model", "distill", SIGMOID])
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


def test_old_log_probs_of_another_sequence_are_named_by_the_second_gradient(ranks):
    fault = blind_faults.old_log_probs_of_another_sequence
    said = run(ranks, Case(words=blind_faults.PLAIN), 2, fault)
    assert said and re.search("step 2: .*minibatch 1.*second formula", said[0])
