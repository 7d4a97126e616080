"""The plan's parameters and state of every GPU preset, against Transformer Engine's own layers.

Kernels of Transformer Engine take no meta tensors, so what its layers keep in a forward pass is not
counted here; ``tests/dryrun`` counts whole steps with Megatron's own layers.
"""

import json

import pytest

from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.memory import rank_parameters
from rlmath.model.parallel import Layout
from rlmath.model.spec import model_spec
from tests.cuda_wheels.programs import answer_of
from tests.cuda_wheels.test_te_models import PRESETS, jobs_of


@pytest.fixture(scope="module")
def rank_models():
    """Preset, job and parameters of each rank."""
    jobs = [(name, job) for name, overrides in PRESETS.items() for job in jobs_of(overrides)]
    answers = answer_of("te_program", "models", json.dumps([job for _, job in jobs]))
    return [
        (name, job, answer["parameters"]) for (name, job), answer in zip(jobs, answers, strict=True)
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_rank_holds_the_parameters_of_the_plan(rank_models, name):
    found = [(job, parameters) for preset, job, parameters in rank_models if preset == name]
    assert found
    for job, parameters in found:
        layout = Layout(**job["layout"])
        stage = job["rank"] // (layout.world_size // layout.pipeline_parallel)
        actor = ActorShape(layout, 0, 1)
        planned = rank_parameters(model_spec(job["config"]), actor, stage)
        assert planned == pytest.approx(parameters, rel=1e-4), (name, stage)
