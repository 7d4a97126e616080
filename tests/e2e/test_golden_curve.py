"""A run of thirty steps gives the loss, reward and gradient norm that are in the repository."""

import copy
import math
import warnings

from tests.e2e import golden_curve


def test_thirty_steps_are_those_in_the_repository(learning_run):
    golden, found = golden_curve.golden(), golden_curve.curve(learning_run)
    here, there = golden_curve.machine(), golden["made_on"]
    if here == there:
        problems = golden_curve.differences(found, golden["curve"])
    else:
        other = [name for name in there if here.get(name) != there[name]]
        warnings.warn(
            "the golden curve is compared with a tolerance only, since these differ from where it "
            + "was made: "
            + ", ".join(f"{name} {here.get(name)} (made on {there[name]})" for name in other),
            stacklevel=1,
        )
        problems = golden_curve.differences_elsewhere(found, golden["curve"])
    assert not problems, "\n".join([f"{len(problems)} differences", *problems[:6]])
    # Steps that learn something.
    rewards = found["reward"]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_a_last_bit_is_a_difference_and_elsewhere_a_wrong_gradient_is():
    curve = golden_curve.golden()["curve"]
    for name in golden_curve.KEYS:
        changed = copy.deepcopy(curve)
        changed[name][17] = math.nextafter(changed[name][17], math.inf)
        (problem,) = golden_curve.differences(changed, curve)
        assert problem.startswith(f"step 18 {name}: ")
        assert not golden_curve.differences_elsewhere(changed, curve)
    assert not golden_curve.differences(curve, curve)
    tripled = curve | {"grad_norm": [3 * value for value in curve["grad_norm"]]}
    assert len(golden_curve.differences_elsewhere(tripled, curve)) == 2
    unlearned = curve | {"reward": curve["reward"][:10] * 3}
    assert len(golden_curve.differences_elsewhere(unlearned, curve)) == 1
