"""Which passes a step makes, from the settings and its number."""

from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.load import load
from rlmath.training.plan import plan_step

GIVEN = ["model.path=tiny", "runner.run_dir=r"]
ONE = "algorithm.minibatches_per_step=1"


def passes(step, *overrides):
    return plan_step(load([*GIVEN, *overrides]), step)


def test_the_first_step_and_every_nth_have_a_gate():
    gates = [step for step in range(1, 12) if passes(step, "alignment.every=5").gate]
    assert gates == [1, 5, 10]
    assert not passes(1, "alignment.every=0").gate


def test_the_first_gate_is_before_the_first_update():
    assert passes(1, ONE).passes == ("old",)
    assert passes(2, ONE).passes == ()
    assert passes(1, ONE, "alignment.every=0").passes == ()


def test_a_reference_pass_needs_a_kl_term():
    assert "reference" not in passes(1).passes
    assert "reference" in passes(1, "algorithm.kl_coef=0.1").passes


def test_the_policy_waits_while_the_value_model_warms_up():
    gae = ["algorithm.advantage=gae", "value.warmup_steps=2"]
    steps = [passes(step, *gae) for step in (1, 2, 3)]
    assert [one.policy for one in steps] == [False, False, True]
    assert all(one.values for one in steps)
    assert passes(1).policy and not passes(1).values


def test_old_log_probs_are_computed_only_when_something_needs_them():
    def needed(*overrides):
        return needs_old_log_probs(load([*GIVEN, *overrides]).algorithm)

    assert needed() and not needed(ONE)
    assert needed(ONE, "algorithm.correction.kind=auto")
    assert needed(ONE, "algorithm.correction.veto_below=1e-4")
    assert needed(ONE, "algorithm.entropy_top_share=0.2", "algorithm.old_log_probs=engine")
    assert needed(ONE, "algorithm.entropy_target=1")
    assert needed(ONE, "algorithm.kl_in=reward")
    assert not needed("algorithm.old_log_probs=engine", "algorithm.kl_in=reward")
    settings = load([*GIVEN, "algorithm.correction.kind=token_mask", "algorithm.correction.high=4"])
    assert settings.algorithm.correction.bounds() == (0.5, 4.0)
