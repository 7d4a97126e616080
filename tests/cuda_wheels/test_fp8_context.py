"""``actor.fp8`` with Transformer Engine itself, on meta tensors: its context around the layers of a
stage, parameters that stay, and the bytes of its tensors beside the plan's.

Products and quantization take a GPU, and nothing here runs them.
"""

import json

import pytest

from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.fp8 import ACTIVATION_BYTES, WEIGHT_BYTES, weight_copy_bytes
from rlmath.model.fp8_training import Fp8Training, rank_matrices
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from tests.cuda_wheels.fp8_wheel_program import TOKENS
from tests.cuda_wheels.programs import answer_of

MODELS = {
    "Qwen2.5-1.5B": Layout(2, 1, 4),
    "Qwen2.5-7B": Layout(4, 1, 2),
    "Qwen3-30B-A3B": Layout(2, 1, 4, expert_parallel=8),
}
INPUTS = {"input of 16,384 tokens": [16384, 3584], "input of a rank": [4096, 1536]}
MOST_ERROR = 0.01
# By recipe, Transformer Engine's class.
RECIPES = {"blockwise": "Float8BlockScaling", "tensorwise": "Float8CurrentScaling"}


def _matrices(name):
    """A model, and each matrix of a layer of a rank with how many there are."""
    spec = model_spec(KNOWN[name])
    found = rank_matrices(spec, MODELS[name], bool(spec.moe_layers))
    return spec, [(f"{name} {one.name}", list(one.shape), one.count) for one in found]


@pytest.fixture(scope="module")
def sizes():
    shapes = {key: shape for name in MODELS for key, shape, _ in _matrices(name)[1]}
    return answer_of("fp8_wheel_program", "bytes", json.dumps(shapes | INPUTS))


@pytest.mark.parametrize("recipe", WEIGHT_BYTES)
@pytest.mark.parametrize("name", MODELS)
def test_copies_of_weights_take_what_the_plan_says(sizes, name, recipe):
    spec, matrices = _matrices(name)
    layer = {
        part: sum(count * sizes[recipe][key][part] for key, _, count in matrices)
        for part in ("rows", "columns")
    }
    actor = ActorShape(MODELS[name], 0, TOKENS, fp8=Fp8Training("hybrid", recipe))
    for backward, counted in ((False, layer["rows"]), (True, sum(layer.values()))):
        planned = weight_copy_bytes(spec, actor, 0, backward=backward)
        assert planned == pytest.approx(spec.layers * counted, rel=MOST_ERROR)


@pytest.mark.parametrize("recipe", ACTIVATION_BYTES)
@pytest.mark.parametrize("name", INPUTS)
def test_a_kept_input_takes_what_the_plan_says(sizes, name, recipe):
    tokens, width = INPUTS[name]
    planned = ACTIVATION_BYTES[recipe] * tokens * width
    assert sizes[recipe][name]["columns"] == pytest.approx(planned, rel=MOST_ERROR)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_in_transformer_engines_context(recipe, recompute):
    found = answer_of("fp8_wheel_program", "context", recipe, recompute)
    assert found["dtypes"] == ["torch.bfloat16"]
    for passed in ("training", "log-probs"):
        *products, count = found[passed]
        assert count == 8, "the matrices of two layers"
        for _, seen, fp8_attention, is_first, _ in products:
            assert (seen, fp8_attention, is_first) == (RECIPES[recipe], False, False)
    *products, count = found["without"]
    assert count == 8 and all(seen is None for _, seen, *_ in products)
