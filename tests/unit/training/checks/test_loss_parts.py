"""Loss against terms, on figures of a healthy minibatch with each fault."""

import pytest
import torch

from rlmath.actor.sequence_report import SequenceReport
from rlmath.algorithms.losses import LossInputs, metric_means
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.training.checks.loss_parts import has_gradient, wrong_loss

KL, ENTROPY = 0.1, 0.02


def figures(tokens=4000, kl_coef=KL, entropy_coef=ENTROPY):
    """Metrics of a minibatch of two micro-batches in float32."""
    tokens = 4000
    draw = torch.Generator().manual_seed(0)
    settings = ObjectiveSettings(kl_coef=kl_coef, entropy_coef=entropy_coef)
    sums = {}
    for _ in range(2):
        log_probs = -3 * torch.rand(tokens, generator=draw)
        inputs = LossInputs(
            log_probs=log_probs,
            old_log_probs=log_probs + 0.3 * torch.randn(tokens, generator=draw),
            engine_log_probs=log_probs,
            advantages=torch.randn(tokens, generator=draw),
            mask=torch.rand(tokens, generator=draw) > 0.1,
            weights=torch.full((tokens,), 1 / (2 * tokens)),
            sequence_ids=torch.zeros(tokens, dtype=torch.int64),
            ref_log_probs=log_probs + 0.5,
            entropy=2 * torch.rand(tokens, generator=draw),
        )
        for name, value in policy_objective(inputs, settings).metric_sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return metric_means(sums) | {"grad_norm": 1.0, "discarded": 0.0}


@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (KL, ENTROPY), (5.0, -0.3)])
def test_loss_of_a_healthy_minibatch_is_the_sum_of_its_terms(kl_coef, entropy_coef):
    assert (
        wrong_loss(figures(kl_coef=kl_coef, entropy_coef=entropy_coef), kl_coef, entropy_coef) == []
    )


def test_missing_or_negated_terms_are_named():
    healthy = figures()
    kl, bonus = KL * healthy["kl_loss"], ENTROPY * healthy["entropy_term"]
    for change, cause in (
        (-kl, "the KL term is missing"),
        (-2 * kl, "the KL term has the opposite sign"),
        (bonus, "the entropy bonus is missing"),
        (2 * bonus, "the entropy bonus has the opposite sign"),
        (-2 * healthy["policy_loss"], "the policy loss has the opposite sign"),
        (0.3 * kl, "a term is wrong"),
    ):
        (sentence,) = wrong_loss(healthy | {"loss": healthy["loss"] + change}, KL, ENTROPY)
        assert sentence.endswith(cause)


def test_signal_without_a_gradient_is_named():
    (sentence,) = wrong_loss(figures() | {"grad_norm": 0.0}, KL, ENTROPY)
    assert "gradient norm is exactly 0" in sentence
    # Nothing but a KL whose gradient is 0 at the reference.
    still = figures() | {"grad_norm": 0.0, "signal": (KL + ENTROPY) * figures()["loss_weight"]}
    assert wrong_loss(still, KL, ENTROPY) == []


def test_minibatch_may_have_no_gradient_if_all_of_it_is_clipped() -> None:
    nan = float("nan")
    second = [[0.0, 0.0, 0.0], [1e-7, 1e-6, 0.0], [0.0, 0.0, 0.0], [0.2, 1e-6, 0.0], [nan] * 3]
    report = SequenceReport(
        minibatches=torch.tensor([0, 0, 1, 1, 2]),
        places=torch.arange(5),
        tokens=torch.arange(5),
        sums=torch.zeros(5, 8),
        second=torch.tensor(second),
    )
    assert [has_gradient(report, index) for index in range(3)] == [False, True, True]
    healthy = figures() | {"grad_norm": 0.0}
    assert "no backward pass reached" in wrong_loss(healthy, KL, ENTROPY)[0]
    assert wrong_loss(healthy, KL, ENTROPY, has_gradient=False) == []
