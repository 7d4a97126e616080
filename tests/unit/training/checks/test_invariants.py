"""Invariants of an update: metrics that satisfy them, and each one violated on purpose."""

import dataclasses
import math
import re

import pytest

from rlmath.actor.settings import UpdateResult
from rlmath.config.load import load
from rlmath.config.schema import OnMisalignment
from rlmath.training.checks.base import InvariantError, report
from rlmath.training.checks.catalog import step_checks
from rlmath.training.checks.invariants import Invariants, missing_routes, violations
from rlmath.training.checks.log_probs import LogProbAgreement
from rlmath.training.gate import Noise

KEPT = {"importance_ratio": 1.0, "kl": 0.0, "grad_norm": 1.0, "lr": 1e-3, "token_count": 4.0}


def settings(*overrides):
    return load(["experiment=quickstart", "algorithm.minibatches_per_step=2", *overrides])


def violations_of(config, *minibatches, **changes):
    result = UpdateResult(
        [KEPT | one for one in minibatches], changes.pop("early_stopped", {}), None
    )
    defaults = {"any_advantage": True, "first_step": True}
    return violations(config, result=result, **defaults | changes)


def test_a_right_step_breaks_none():
    assert violations_of(settings(), {}, {"importance_ratio": 1.2, "kl": 0.3}) == []


def test_the_first_ratio_is_one():
    (sentence,) = violations_of(settings(), {"importance_ratio": 1.0004}, {})
    assert "first minibatch is 1.0004000, not 1 to within 1e-05" in sentence
    # Log-probs of the engine differ by right; bfloat16 rounds; a discarded one has its own word.
    assert not violations_of(
        settings("algorithm.old_log_probs=engine"), {"importance_ratio": 1.1}, {}
    )
    assert not violations_of(settings("model.dtype=bfloat16"), {"importance_ratio": 1.0004}, {})
    assert not violations_of(
        settings(), {"importance_ratio": 9.0}, {}, early_stopped={0: "above 5"}
    )


def test_first_ratio_of_bfloat16_may_be_off_by_the_models_own_rounding_noise():
    """Its old log-probs may come from other micro-batches (actor.max_tokens_per_forward)."""
    config = settings("model.dtype=bfloat16", "algorithm.kl_coef=0.1")
    unsure = {"importance_ratio": 1.03, "kl": 0.03}
    assert (
        len(violations_of(config, unsure, {}))
        == len(violations_of(config, unsure, {}, noise_excess=0.02))
        == 2
    )
    assert not violations_of(config, unsure, {}, noise_excess=0.07)
    assert len(violations_of(config, unsure, {}, noise_excess=math.nan)) == 2
    assert violations_of(settings(), {"importance_ratio": 1.0004}, {}, noise_excess=0.07), "float32"


def test_the_noise_is_that_of_the_runs_gate():
    checks = {type(one): one for one in step_checks()._checks}
    agreement, invariants = checks[LogProbAgreement], checks[Invariants]
    assert isinstance(agreement, LogProbAgreement) and isinstance(invariants, Invariants)
    assert invariants._gate is agreement.gate and agreement.gate.noise_excess == 0.0
    agreement.gate._noise = Noise(0.07, 1.0)
    assert agreement.gate.noise_excess == 0.07


def test_without_a_learning_rate_all_ratios_are_one():
    still = {"lr": 0.0}
    assert not violations_of(settings(), still, still)
    (sentence,) = violations_of(settings(), still, still | {"importance_ratio": 0.99})
    assert "minibatch 1 is 0.9900000" in sentence and "learning rate is 0" in sentence


def test_the_reference_is_the_policy_at_first():
    config = settings("algorithm.kl_coef=0.1")
    (sentence,) = violations_of(config, {"kl": 0.002}, {"kl": 0.3})
    assert "KL to the reference is 0.002" in sentence
    assert not violations_of(config, {"kl": 0.002}, {}, first_step=False)


def test_old_log_probs_of_the_present_weights_are_named():
    same = {"approx_kl": 0.0}
    (sentence,) = violations_of(settings(), same, same)
    assert "minibatch 1 is exactly 1 in every token" in sentence
    assert not violations_of(settings(), same, {"approx_kl": 1e-12})
    for still in ({"lr": 1e-9}, {"discarded": 1.0}, {"grad_norm": 0.0}):
        assert not violations_of(settings(), same | still, same | still)
    assert not violations_of(settings("algorithm.old_log_probs=engine"), same, same)
    assert not violations_of(settings("actor.lora.rank=8"), same, same)


def test_reference_that_is_the_policy_is_named():
    config, later = settings("algorithm.kl_coef=0.1"), {"first_step": False, "has_moved": True}
    (sentence,) = violations_of(config, {"kl": 0.0}, {"kl": 0.1}, **later)
    assert "KL to the frozen reference is exactly 0" in sentence
    assert not violations_of(config, {"kl": 1e-9}, {"kl": 0.1}, **later)
    assert not violations_of(config, {"kl": 0.0}, {"kl": 0.1}, first_step=False)
    renewed = settings("algorithm.kl_coef=0.1", "algorithm.reference.kind=averaged")
    assert not violations_of(renewed, {"kl": 0.0}, {"kl": 0.1}, **later)
    assert not violations_of(settings(), {"kl": 0.0}, {}, **later)


def test_no_advantage_no_gradient():
    quiet = {"grad_norm": 0.0}
    assert not violations_of(settings(), quiet, quiet, any_advantage=False)
    (sentence,) = violations_of(settings(), quiet, {"grad_norm": 0.25}, any_advantage=False)
    assert "gradient norm of minibatch 1 is 0.25" in sentence
    with_entropy = settings("algorithm.entropy_coef=0.01")
    assert not violations_of(with_entropy, {"grad_norm": 0.25}, {}, any_advantage=False)


def test_engines_give_routes_of_all_but_the_last_tokens():
    def message_of(missing, lengths):
        share = {"routing/engine_missing_share": missing / sum(lengths)}
        return " ".join(missing_routes(share, lengths))

    assert not message_of(2, [100, 100])
    assert not message_of(100, [2] * 100)  # Short ones have as much.
    assert not message_of(21, [100, 100])
    assert re.search(
        r"16\.0% of the tokens .*\(1\.0%\).* at most 10% more", message_of(32, [100, 100])
    )
    assert "100.0% of the tokens" in message_of(200, [2] * 100)


def test_on_fail_stops_or_warns():
    config, warnings = settings(), []

    class Listener:
        warn = staticmethod(warnings.append)

    sentences = violations_of(config, {"importance_ratio": 2.0})
    with pytest.raises(InvariantError, match=r"step 7: the importance ratio .* alignment\.on_fail"):
        report(config, sentences, 7, Listener())
    lenient = dataclasses.replace(config.alignment, on_fail=OnMisalignment.warn)
    config = dataclasses.replace(config, alignment=lenient)
    report(config, sentences, 7, Listener())
    assert len(warnings) == 1 and warnings[0].startswith("step 7: the importance ratio")
